"""`Conversation`: chat messages of one trajectory, and the tokens that the policy saw and drew.

Each request of a framework holds the whole conversation so far. What it begins with must be what it
held before, with the policy's reply behind it: then only what is new is encoded, and the record
stays what the policy saw, token for token. A request that says it otherwise is refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from m2flow.models.chat_template import written
from m2flow.tools import ToolCall, ToolResult
from m2flow.workloads.agentic.config import EpisodeSection
from m2flow.workloads.agentic.dialect import ChatDialect
from m2flow.workloads.agentic.episodes import Turn


class RefusedRequest(Exception):
    """A request that cannot be answered; the text is for whoever sent it."""


class Conversation:
    """The record of one trajectory, which grows in threads of the server until it is closed.

    Args:
        tokenizer: the model's.
        dialect: how calls are written.
        episode: limits.
        item, seed: of the trajectory.
        stop_ids: tokens that end a turn.
        context: tokens that the model can hold; None for any number.

    Attributes:
        prompt_ids: what the policy saw before it drew anything.
        ids, mask, logprobs: all behind it, as in `m2flow.workloads.agentic.episodes`.
        turns: where each turn ends.
        version: of the weights that drew the first token and the last.
        reason: why it ended, as far as is known: of the last turn, or "turns" or "length".
        drawing: whether a further turn is to come, for a request that was taken in.
    """

    def __init__(
        self,
        tokenizer: Any,
        dialect: ChatDialect,
        episode: EpisodeSection,
        item: int,
        seed: int,
        stop_ids: Sequence[int],
        context: int | None = None,
    ) -> None:
        self._tokenizer, self._dialect, self._episode = tokenizer, dialect, episode
        self.item, self.seed, self._stop_ids = item, seed, frozenset(stop_ids)
        self._most = context
        self.prompt_ids: list[int] = []
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.turns: list[Turn] = []
        self.version: tuple[int, int] | None = None
        self.reason = ""
        self.drawing = False
        self._known: list[Any] = []
        self._tools: Any = None
        self._reply: dict[str, Any] | None = None
        self._calls: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Take in nothing more: the record stays as it is now."""
        with self._lock:
            self._closed = True

    def extend(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Take in a request; the policy is to go on behind `context` then.

        Returns:
            the reply that was given already, where the request is the last one again; else None.

        Raises:
            RefusedRequest: it rewrites the conversation, the limits are reached, or the
                conversation is closed.
        """
        with self._lock:
            self._check_open()
            return self._extended(messages, tools)

    def _check_open(self) -> None:
        if self._closed:
            raise RefusedRequest("the trajectory has ended")

    def _extended(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        said = [_canonical(message) for message in messages]
        if not said:
            raise RefusedRequest("messages are missing")
        if self._reply is None:
            if self.prompt_ids:
                raise RefusedRequest("the conversation has a request that is not answered yet")
            self._begin(messages, tools)
        elif said == self._known:
            return self._reply
        else:
            self._go_on(messages, said, tools)
        self._known, self._tools, self._reply = said, list(tools), None
        self.drawing = True
        return None

    def _begin(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        try:
            text = written(
                self._tokenizer,
                list(map(_for_template, messages)),
                self._dialect.options,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
            )
        except Exception as error:
            raise RefusedRequest(f"the chat template refuses the messages: {error}") from error
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        self._check_room(len(ids))
        self.prompt_ids = ids

    def _go_on(
        self,
        messages: Sequence[Mapping[str, Any]],
        said: Sequence[Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        expected = [*self._known, _canonical(self._reply or {})]
        count = len(expected)
        if said[:count] != expected or list(tools) != self._tools or len(said) == count:
            raise RefusedRequest(
                "the conversation is not the last one with the reply and something new behind it; "
                "each trajectory is one conversation, whose beginning and tools stay as they are"
            )
        if len(self.turns) >= self._episode.max_turns:
            self.reason = "turns"
            raise RefusedRequest(f"episode.max_turns = {self._episode.max_turns} are used up")
        added = self._added(messages[count:])
        self.turns[-1] = replace(self.turns[-1], tools=self._calls)
        if len(self.ids) + len(added) >= self._episode.max_tokens:
            self.reason = "length"
            raise RefusedRequest(f"episode.max_tokens = {self._episode.max_tokens} are used up")
        self._check_room(len(self.context) + len(added))
        self.ids += added
        self.mask += [False] * len(added)
        self.logprobs += [0.0] * len(added)
        self.turns[-1] = replace(self.turns[-1], result_end=len(self.ids))

    def _check_room(self, count: int) -> None:
        """Refuse so many tokens where the model could draw none behind them."""
        if self._most is not None and count >= self._most:
            self.reason = "length"
            raise RefusedRequest(
                f"{count} tokens leave no room for a reply: the model's context is {self._most}"
            )

    def _added(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of new messages, behind the last turn's end token."""
        # A turn that was cut off has none, and the template writes one.
        end = [] if self.ids[-1] in self._stop_ids else [self._tokenizer.eos_token_id]
        if all(message.get("role") == "tool" for message in messages):
            answers = [ToolResult(_text(message.get("content"))) for message in messages]
            return end + self._dialect.result_ids(answers)[0]
        return end + self._dialect.message_ids(list(map(_for_template, messages)))

    @property
    def context(self) -> list[int]:
        """All that the policy is to see now."""
        return [*self.prompt_ids, *self.ids]

    def take(self, drawn: Any) -> dict[str, Any]:
        """Add a turn; the message that replies.

        Args:
            drawn: the `Completion`.

        Raises:
            RefusedRequest: the conversation is closed.
        """
        with self._lock:
            self._check_open()
            return self._with_turn(drawn)

    def _with_turn(self, drawn: Any) -> dict[str, Any]:
        self.drawing = False
        ids, begin = drawn.token_ids.tolist(), len(self.ids)
        self.ids += ids
        self.mask += [True] * len(ids)
        self.logprobs += drawn.logprobs.tolist()
        self.turns.append(Turn(begin, len(self.ids), result_end=len(self.ids)))
        self.version = ((self.version or drawn.versions)[0], drawn.versions[1])
        self.reason = drawn.finish_reason
        self._reply = self._message(ids)
        return self._reply

    def _message(self, ids: list[int]) -> dict[str, Any]:
        """A turn as an assistant's message; a call that cannot be read stays text."""
        found = self._dialect.calls(ids) if self.reason == "stop" else []
        calls = [call for call in found if isinstance(call, ToolCall)]
        if not calls or len(calls) < len(found):
            self._calls = ()
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            return {"role": "assistant", "content": text}
        self._calls = tuple(call.tool for call in calls)
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return {
            "role": "assistant",
            "content": self._dialect.before_calls(text).strip() or None,
            "tool_calls": [
                {
                    "id": f"call_{self.item}_{len(self.turns)}_{number}",
                    "type": "function",
                    "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
                }
                for number, call in enumerate(calls)
            ],
        }


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it: its content is one text, and arguments of calls are objects.

    An assistant's may have no content beside its calls.
    """
    told, content = dict(message), message.get("content")
    if content is not None or message.get("role") == "tool":
        told["content"] = _text(content)
    if calls := message.get("tool_calls"):
        told["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}}
            for call in calls
        ]
    return told


def _arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a call, which the API has as JSON text; what is no object stays as it is."""
    arguments = call["function"]["arguments"]
    try:
        read = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _text(content: Any) -> str:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        raise RefusedRequest("contents of messages must be text")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RefusedRequest(f"contents of messages must be text, and a part is {kind!r:.80}")
    return "".join(part["text"] for part in content)


def _canonical(message: Mapping[str, Any]) -> Any:
    """What of a message is said, however it is written."""
    if not isinstance(message, Mapping):
        raise RefusedRequest("a message must be an object")
    calls = message.get("tool_calls") or ()
    try:
        told = [(call["id"], call["function"]["name"], _parsed(call["function"]["arguments"]))
                for call in calls]  # fmt: skip
    except (KeyError, TypeError):
        raise RefusedRequest("tool_calls must have id, function.name and arguments") from None
    return message.get("role"), _text(message.get("content")), told, message.get("tool_call_id")


def _parsed(arguments: Any) -> Any:
    """Arguments of a call, the same text for the same JSON: some frameworks write it anew."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return arguments
