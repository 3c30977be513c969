"""The HTTP server: chat completions on loopback, one conversation for each key.

A request waits in a thread of its own until whoever owns the engine has drawn its reply. Nothing
but loopback reaches it, and nobody without a key.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from m2flow.errors import UserError
from m2flow.workloads.agentic.endpoint.conversation import Conversation, RefusedRequest

MAX_BYTES = 16 << 20
"""Of a request."""

AGAIN_SECONDS = 60.0
"""How long a request that comes again waits for the reply to the first one, which goes on."""

NEUTRAL: tuple[tuple[str, Any], ...] = (
    ("n", 1),
    ("stop", None),
    ("logit_bias", None),
    ("frequency_penalty", 0),
    ("presence_penalty", 0),
    ("response_format", {"type": "text"}),
    ("logprobs", False),
    ("top_logprobs", 0),
    ("functions", None),
    ("parallel_tool_calls", True),
    ("reasoning_effort", None),
    # Of vLLM's and SGLang's endpoints.
    ("repetition_penalty", 1),
    ("min_tokens", 0),
    ("ignore_eos", False),
    ("stop_token_ids", None),
    ("chat_template_kwargs", None),
    ("chat_template", None),
    ("add_generation_prompt", True),
    ("continue_final_message", False),
    ("truncate_prompt_tokens", None),
    ("structured_outputs", None),
    ("guided_json", None),
    ("guided_regex", None),
    ("guided_choice", None),
    ("guided_grammar", None),
    ("regex", None),
    ("ebnf", None),
    ("bad_words", None),
    ("allowed_token_ids", None),
    ("use_beam_search", False),
)
"""What requests may say of what is not served: that they do not ask for it."""

CHOICES = ("auto", "required")
"""What `tool_choice` may be. "required", which some frameworks send, is left to the policy."""

NO_SUCH_KEY = "no conversation has this key"

MODEL = "policy"
"""What the policy is called."""

Draw = Callable[[Conversation, int | None], Any]
"""Draws a conversation's next turn, of so many tokens at most, and waits for it."""


class StillDrawn(Exception):
    """A request has come again whose reply is being drawn; its client is to ask later."""


class UnknownKey(Exception):
    """Somebody asks with a key that was not given out."""


class ConversationServer:
    """Serves conversations until it is closed.

    Args:
        draw: gives the `Completion` of a conversation's next turn.
        sampling: what requests may say of the sampling, which the recipe has decided.
    """

    def __init__(self, draw: Draw, sampling: Mapping[str, float]) -> None:
        self._draw, self._sampling = draw, dict(sampling)
        self._conversations: dict[str, Conversation] = {}
        self._busy: dict[str, Any] = {}  # what is asked
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        handler = type("Handler", (_ConversationHandler,), {"owner": self})
        self._http = _HTTP(("127.0.0.1", 0), handler)
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def open(self, conversation: Conversation) -> str:
        """Serve a conversation; the key that it is asked for by."""
        key = secrets.token_urlsafe(24)
        with self._lock:
            self._conversations[key] = conversation
        return key

    def forget(self, key: str) -> None:
        """Serve a conversation no more."""
        with self._lock:
            self._conversations.pop(key, None)

    def knows(self, key: str) -> bool:
        """Whether a conversation is served by this key."""
        with self._lock:
            return key in self._conversations

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()

    def complete(self, key: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request for a chat completion.

        Raises:
            UnknownKey: nobody has this key.
            RefusedRequest: it cannot be answered.
            StillDrawn: the same request came before, and is not answered yet.
        """
        limit = self._checked(asked)
        messages, tools = _objects(asked, "messages"), _objects(asked, "tools")
        with self._lock:
            if self._busy.get(key, (messages, tools)) != (messages, tools):
                raise RefusedRequest("one request at a time: the last one is not answered yet")
            if not self._answered.wait_for(lambda: key not in self._busy, timeout=AGAIN_SECONDS):
                raise StillDrawn("the reply to this request is still being drawn")
            conversation = self._conversations.get(key)
            if conversation is None:
                raise UnknownKey(NO_SUCH_KEY)
            self._busy[key] = messages, tools
        try:
            message = conversation.extend(messages, tools)
            if message is None:
                message = conversation.take(self._draw(conversation, limit))
        finally:
            with self._lock:
                del self._busy[key]
                self._answered.notify_all()
        return _completion(conversation, message)

    def _checked(self, asked: Mapping[str, Any]) -> int | None:
        """The longest reply that a request asks for."""
        for name, ours in self._sampling.items():
            theirs = asked.get(name)
            if name == "top_k" and theirs == -1:  # which stands for all tokens in vLLM
                theirs = 0
            if theirs is not None and theirs != ours:
                raise RefusedRequest(
                    f"{name} is {ours} in the recipe, which training relies on, and not {theirs}"
                )
        if asked.get("tools") and asked.get("tool_choice") not in (None, *CHOICES):
            raise RefusedRequest(f"tool_choice = {asked['tool_choice']!r} is not served")
        for name, plain in NEUTRAL:
            if asked.get(name) not in (None, plain, {}, []):
                raise RefusedRequest(f"{name} = {asked[name]!r} is not served")
        for name in ("max_completion_tokens", "max_tokens"):
            limit = asked.get(name)
            if limit is not None:
                if type(limit) is not int or limit < 1:
                    raise RefusedRequest(f"{name} must be 1 or more, and is {limit!r}")
                return limit
        return None


def _check_texts(asked: Mapping[str, Any]) -> None:
    """Refuse what JSON can write and no tokenizer can read."""
    try:
        json.dumps(asked, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RefusedRequest(
            f"a text holds {half!r}, half of a surrogate pair, which stands for no character"
        ) from error


def _objects(asked: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = asked.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise RefusedRequest(f"{name} must be a list of objects")
    return found


def _completion(conversation: Conversation, message: Mapping[str, Any]) -> dict[str, Any]:
    last = conversation.turns[-1]
    reason = "length" if conversation.reason == "length" else "stop"
    seen, drawn = len(conversation.prompt_ids) + last.begin, last.end - last.begin
    return {
        "id": f"chatcmpl-{conversation.item}-{len(conversation.turns)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": dict(message),
                "finish_reason": "tool_calls" if message.get("tool_calls") else reason,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": seen,
            "completion_tokens": drawn,
            "total_tokens": seen + drawn,
        },
    }


def _chunks(completion: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A completion as a stream: its message in one piece, why it ended, and its usage if asked."""
    (choice,) = completion["choices"]
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    shared = {name: completion[name] for name in ("id", "created", "model")}
    shared["object"] = "chat.completion.chunk"
    for delta, reason in ((message, None), ({}, choice["finish_reason"])):
        yield {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    options = asked.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield {**shared, "choices": [], "usage": completion["usage"]}


class _HTTP(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # agents begin all at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of an error, unless it is that a client has left before its reply."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _ConversationHandler(BaseHTTPRequestHandler):
    owner: ConversationServer
    protocol_version = "HTTP/1.1"
    timeout = 30  # a client that says nothing is let go

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            self._refuse(404, f"nothing is served at {self.path}")

    def do_POST(self) -> None:
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()
        if not self.owner.knows(key):
            return self._turn_away(401, NO_SUCH_KEY)
        if "Transfer-Encoding" in self.headers:
            return self._turn_away(411, "Transfer-Encoding is not served: say Content-Length")
        said = self.headers.get("Content-Length", "0")
        length = int(said) if re.fullmatch("[0-9]{1,18}", said) else -1
        if not 0 <= length <= MAX_BYTES:
            status = 400 if length < 0 else 413
            return self._turn_away(status, f"Content-Length must be 0 to {MAX_BYTES}")
        body = self.rfile.read(length)
        if self.path != "/v1/chat/completions":
            return self._refuse(404, f"nothing is served at {self.path}")
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict):
                raise RefusedRequest("a request must be a JSON object")
            _check_texts(asked)
            completion = self.owner.complete(key, asked)
            if asked.get("stream"):
                told = [*map(json.dumps, _chunks(completion, asked)), "[DONE]"]
                events = "".join(f"data: {one}\n\n" for one in told)
                self._send_bytes(200, "text/event-stream", events.encode())
            else:
                self._send(200, completion)
        except UnknownKey as error:
            self._refuse(401, str(error))
        except UserError as error:  # such as messages that the chat template cannot write
            self._refuse(400, str(error))
        except (ValueError, RecursionError):
            self._refuse(400, "the request is no JSON")
        except RefusedRequest as error:
            self._refuse(400, str(error))
        except StillDrawn as error:  # clients ask again, where they are told so by this status
            self._refuse(409, str(error))
        except TimeoutError as error:  # whoever draws has gone
            self._refuse(503, str(error))
        return None

    def _turn_away(self, status: int, message: str) -> None:
        """Refuse a request whose body is not read: no other can come on its connection."""
        self.close_connection = True
        self._refuse(status, message)

    def _refuse(self, status: int, message: str) -> None:
        self._send(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        self._send_bytes(status, "application/json", json.dumps(content).encode())

    def _send_bytes(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are no news."""
