"""How a model writes calls of tools, and how answers come back to it, in tokens.

A dialect reads a turn's own token ids and says which calls stand in it; of answers it makes the
token ids that follow the turn. What the model has drawn is never encoded again, and an answer is
encoded once: its ids are the record. The text of an answer cannot become a special token.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from m2flow.errors import UserError
from m2flow.models.chat_template import written
from m2flow.tools import ToolCall, ToolResult
from m2flow.tools.tool import schema
from m2flow.workloads.agentic.config import KEYS_OF_DIALECTS, EpisodeSection
from m2flow.workloads.common.recipe import refuse_keys_of_others

CUT = " ...[cut]"
"""What stands at the end of an answer that was too long."""


class Dialect(Protocol):
    """How calls are written.

    Attributes:
        stop_ids: tokens that end a turn, beside the model's own.
        closing_strings: texts that end a turn, in the token that completes one.
    """

    stop_ids: tuple[int, ...]
    closing_strings: tuple[str, ...]

    def calls(self, ids: Sequence[int]) -> list[ToolCall | ToolResult]:
        """The calls in a turn; in the place of one that is no call, what is wrong with it.

        Args:
            ids: the tokens of the turn, the one that ended it included.
        """

    def without_calls(self, ids: Sequence[int]) -> str:
        """The text of a turn without its calls, also without one that the turn's end cut off."""

    def end_ids(self, ids: Sequence[int]) -> list[int]:
        """What ends a turn that calls something, where its own tokens leave that out."""

    def result_ids(self, answers: Sequence[ToolResult]) -> tuple[list[int], int]:
        """What follows a turn, up to where the model goes on; and how many answers were cut."""

    def turn_ids(self, turn: str | ToolCall) -> list[int]:
        """A turn as the model should write it, for a demonstration: a last text, or a call."""


def dialect_of(
    tokenizer: Any,
    episode: EpisodeSection,
    tools: Sequence[str],
    chat_options: Mapping[str, Any] | None = None,
) -> Dialect:
    """The dialect of a recipe for a model's tokenizer.

    Args:
        tokenizer: the model's.
        episode: names it.
        tools: names of the tools there are.
        chat_options: variables of the chat template.

    Raises:
        UserError: the tokenizer cannot write it, or keys of another one are set.
    """
    name = episode.dialect
    if name == "auto":
        name = "chat" if getattr(tokenizer, "chat_template", None) else "tags"
    if name == "chat":
        chosen = episode.model_copy(update={"dialect": "chat"})
        refuse_keys_of_others(chosen, "episode.dialect", KEYS_OF_DIALECTS)
        return ChatDialect(tokenizer, episode.max_result_tokens, chat_options)
    return TagDialect(tokenizer, episode, tools)


class _TokenWriter:
    """Text as tokens, of which no part becomes a special token.

    It has a copy of the tokenizer: whether special tokens are split is state of a fast tokenizer,
    and other threads encode with the original at the same time.

    Args:
        tokenizer: the model's.
        limit: most tokens of a text that may be cut.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer, self._limit = copy.deepcopy(tokenizer), limit
        self._mark = self.literal(CUT)  # sets the copy's state, which no later call changes

    def literal(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no character
        ids: list[int] = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True
        )["input_ids"]  # fmt: skip
        return ids

    def cut(self, text: str) -> tuple[list[int], bool]:
        """A text's tokens up to the limit, and whether some were left out, which is marked."""
        # A token is at least a byte or so: what cannot fit need not be encoded.
        limit, mark = self._limit, self._mark
        ids = self.literal(text[: 16 * limit + 64])
        if len(ids) <= limit and len(text) <= 16 * limit + 64:
            return ids, False
        return ids[: max(0, limit - len(mark))] + mark[:limit], True


class TagDialect:
    """A call between two texts, its answer between two others, all within one text.

    Where there is one tool the text of a call is its argument; else its first word is the tool.
    """

    def __init__(self, tokenizer: Any, episode: EpisodeSection, tools: Sequence[str]) -> None:
        self._tokenizer, self._tools = tokenizer, tuple(tools)
        self._open, self._close = episode.call
        self._result = episode.result
        self._writer = _TokenWriter(tokenizer, episode.max_result_tokens)
        close = tuple(tokenizer.encode(self._close, add_special_tokens=False))
        self.stop_ids: tuple[int, ...] = close if len(close) == 1 else ()
        # A special token is no text. Any other text may stand within a token that has more of it.
        special = bool(self.stop_ids) and close[0] in _special_ids(tokenizer)
        self.closing_strings: tuple[str, ...] = () if special else (self._close,)
        opening = self._written(self._open)
        alone = len(opening) == 1 and opening[0] in _special_ids(tokenizer)
        self._opening = opening[0] if alone else None

    def _written(self, text: str) -> list[int]:
        """Tokens of a text that the recipe gives, whose special tokens are meant."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _parts(self, ids: Sequence[int]) -> tuple[str, str, str, bool]:
        """A turn's text before its call, what opens the call if it is there, the call's text, and
        whether the call was closed.
        """
        ids, closed, before = list(ids), bool(ids) and ids[-1] in self.stop_ids, None
        if self._opening in ids:
            place = len(ids) - 1 - ids[::-1].index(self._opening)
            before = self._tokenizer.decode(ids[:place], skip_special_tokens=True)
            ids = ids[place + 1 :]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        if not closed and self.closing_strings:
            text, close, _ = text.partition(self._close)
            closed = bool(close)
        if before is not None:
            return before, self._open, text, closed
        return (*text.rpartition(self._open), closed)

    def calls(self, ids: Sequence[int]) -> list[ToolCall | ToolResult]:
        _, opened, inner, closed = self._parts(ids)
        if not closed:
            return []
        if not opened:
            return [ToolResult(f"a call begins with {self._open}", error=True)]
        inner = inner.removesuffix(self._close).strip()
        if len(self._tools) == 1:
            return [ToolCall(self._tools[0], inner)]
        tool, argument = (*inner.split(None, 1), "", "")[:2]
        return [ToolCall(tool, argument)]

    def without_calls(self, ids: Sequence[int]) -> str:
        said, opened, rest, closed = self._parts(ids)
        return said if opened or closed else rest

    def end_ids(self, ids: Sequence[int]) -> list[int]:
        return []

    def result_ids(self, answers: Sequence[ToolResult]) -> tuple[list[int], int]:
        ids, num_cut = [], 0
        for answer in answers:
            inner, cut = self._writer.cut(answer.text.strip())
            ids += self._written(self._result[0]) + inner + self._written(self._result[1])
            num_cut += cut
        return ids, num_cut

    def turn_ids(self, turn: str | ToolCall) -> list[int]:
        if isinstance(turn, str):
            return [*self._writer.literal(turn), self._tokenizer.eos_token_id]
        values = turn.arguments
        argument = values if isinstance(values, str) else " ".join(map(str, values.values()))
        named = argument if len(self._tools) == 1 else f"{turn.tool} {argument}"
        begin = [] if self._opening is None else [self._opening]
        text = named if begin else f"{self._open}{named}"
        if self.stop_ids:
            return [*begin, *self._writer.literal(text), *self.stop_ids]
        return [*begin, *self._writer.literal(f"{text}{self._close}")]


class ChatDialect:
    """Calls as JSON in `<tool_call>` tags, answers as turns of the tokenizer's chat template.

    A turn ends with the model's own end token. What stands between it and the model's next turn is
    what the template puts there, and is learned from the template itself. Tags within thoughts,
    which end with `</think>`, are no calls.

    Raises:
        UserError: the template has no turns of tools, or writes calls in another way.
    """

    stop_ids: tuple[int, ...] = ()
    closing_strings: tuple[str, ...] = ()
    _CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def __init__(
        self,
        tokenizer: Any,
        max_result_tokens: int,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self.options = tokenizer, dict(chat_options or {})
        self._writer = _TokenWriter(tokenizer, max_result_tokens)
        self._ends = _special_ids(tokenizer)
        self._specials = tokenizer.convert_ids_to_tokens(sorted(self._ends))
        self._one = self._between(1)
        two = self._between(2)
        # Some templates put all answers to one turn into one turn of their own.
        self._two_between = two[1]
        self._two_ends = two[0], two[2]
        self._check_calls()

    def _check_calls(self) -> None:
        """Refuse a template that writes calls otherwise than they are read."""
        wanted = ToolCall("m2flow_tool", {"text": "m2flow"})
        function = {"name": wanted.tool, "arguments": wanted.arguments}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer = {"role": "tool", "tool_call_id": _CALL_ID, "content": _HERE.format(0)}
        about = {"name": wanted.tool, "description": "", "parameters": schema(text="any")}
        # With a tool, as in a prompt: a tokenizer may have a template for that case alone.
        options = {**self.options, "tools": [{"type": "function", "function": about}]}
        text = _written(self._tokenizer, [_ASKED, turn, answer], options)
        behind = text.partition(_ASKED["content"])[2]
        if self._calls_in(behind.partition(_HERE.format(0))[0]) != [wanted]:
            raise UserError(
                "the chat template of the model's tokenizer does not write calls of tools as "
                '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
                key="episode.dialect",
                value="chat",
                hint="take a model that was tuned to call tools so, or set episode.dialect to tags",
            )

    def calls(self, ids: Sequence[int]) -> list[ToolCall | ToolResult]:
        return self._calls_in(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _calls_in(self, text: str) -> list[ToolCall | ToolResult]:
        _, said = _divided(text)
        return [
            _read(inner.strip())
            if closed
            else ToolResult("a call ends with </tool_call>", error=True)
            for inner, closed in self._CALL.findall(said)
        ]

    def without_calls(self, ids: Sequence[int]) -> str:
        thoughts, said = _divided(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        text = thoughts + self._CALL.sub("", said)
        for special in self._specials:
            text = text.replace(special, "")
        return text

    def before_calls(self, text: str) -> str:
        """What stands before the first call in the text of a turn."""
        thoughts, said = _divided(text)
        return thoughts + said.partition("<tool_call>")[0]

    def end_ids(self, ids: Sequence[int]) -> list[int]:
        # A text of `generation.stop` may have ended it. The template writes the end token then too.
        return [] if ids[-1] in self._ends else [self._tokenizer.eos_token_id]

    def result_ids(self, answers: Sequence[ToolResult]) -> tuple[list[int], int]:
        before, after = self._one if len(answers) == 1 else self._two_ends
        ids, num_cut = self._special(before), 0
        for number, answer in enumerate(answers):
            inner, cut = self._writer.cut(answer.text)
            ids += (self._special(self._two_between) if number else []) + inner
            num_cut += cut
        return ids + self._special(after), num_cut

    def turn_ids(self, turn: str | ToolCall) -> list[int]:
        if isinstance(turn, ToolCall):
            call = json.dumps({"name": turn.tool, "arguments": turn.arguments})
            turn = f"<tool_call>\n{call}\n</tool_call>"
        return [*self._special(turn), self._tokenizer.eos_token_id]

    def message_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """What follows a turn where these messages, of any role, come next."""
        answers = [one["content"] for one in messages if one.get("role") == "tool"]
        marks = map(_HERE.format, range(len(answers)))
        marked = [{**one, "content": next(marks)} if one.get("role") == "tool" else one
                  for one in messages]  # fmt: skip
        rest, ids = _after_turn(self._tokenizer, marked, self.options), []
        for number, answer in enumerate(answers):
            before, _, rest = rest.partition(_HERE.format(number))
            ids += self._special(before) + self._writer.cut(answer)[0]
        return ids + self._special(rest)

    def _between(self, count: int) -> tuple[str, ...]:
        """What stands before, between and behind so many answers."""
        texts = [_HERE.format(number) for number in range(count)]
        answers = [{"role": "tool", "content": text} for text in texts]
        rest = _after_turn(self._tokenizer, answers, self.options)
        parts = []
        for text in texts:
            part, found, rest = rest.partition(text)
            if not found:
                raise UserError(
                    "the chat template of the model's tokenizer leaves out what tools answer",
                    key="episode.dialect",
                    value="chat",
                    hint="take a model that was tuned to use tools, or set episode.dialect to tags",
                )
            parts.append(part)
        return (*parts, rest)

    def _special(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    named = {number for number, token in added if token.special}
    return frozenset({tokenizer.eos_token_id, *named})


def _divided(text: str) -> tuple[str, str]:
    """The thoughts of a turn, the tag that ends them included, and what it says behind them."""
    thoughts, end, said = text.rpartition("</think>")
    return thoughts + end, said


def _read(text: str) -> ToolCall | ToolResult:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ToolResult("a call is JSON with name and arguments, and this is no JSON", error=True)
    match found:
        case {"name": str() as name, "arguments": dict() as arguments}:
            return ToolCall(name, arguments)
        case {"name": str() as name} if len(found) == 1:
            return ToolCall(name, {})
    return ToolResult('a call is {"name": ..., "arguments": {...}}', error=True)


_SAID, _HERE = "m2flow said", "m2flow answer {}"
_ASKED = {"role": "user", "content": "m2flow asked"}
_CALL_ID = "m2flow000"
"""Nine letters and digits, which is the form that Mistral's templates ask for."""


def _written(tokenizer: Any, turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Turns in the chat template, up to where the model goes on.

    Raises:
        UserError: the template cannot write them.
    """
    try:
        return written(tokenizer, turns, options, add_generation_prompt=True)
    except Exception as error:
        raise UserError(
            f"the chat template of the model's tokenizer cannot write turns of tools ({error})",
            key="episode.dialect",
            value="chat",
            hint="take a model that was tuned to use tools, or set episode.dialect to tags",
        ) from error


def _after_turn(
    tokenizer: Any, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> str:
    """The text that a template puts behind the end token of a turn, where these messages follow.

    Raises:
        UserError: the template cannot write it, or writes the turn in another way then.
    """
    turns = [_ASKED, {"role": "assistant", "content": _SAID}, *messages]
    text = _written(tokenizer, turns, options)
    _, said, rest = text.partition(_SAID)
    end = tokenizer.eos_token or ""
    before, ended, after = rest.partition(end)
    if not said or not end or not ended or before.strip():
        raise UserError(
            "the chat template of the model's tokenizer does not end turns with its end token",
            key="episode.dialect",
            value="chat",
            hint="set episode.dialect to tags, or eos_token to what ends a turn",
        )
    return after
