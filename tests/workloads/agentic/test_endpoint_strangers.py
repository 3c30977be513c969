"""Who may speak to the endpoint of conversations, and what callers without a key, or sense, get."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from m2flow.workloads.agentic.endpoint import server as endpoint
from m2flow.workloads.agentic.endpoint.server import MAX_BYTES, ConversationServer
from tests.runtime.transport.strangers import PATIENCE, SOON, check_nobody_waits

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
BODY = json.dumps({"temperature": 0.3}).encode()
"""Is read, and refused for what it says."""


def drawn(*_: Any) -> None:
    raise AssertionError("nothing is to be drawn")


@pytest.fixture
def server() -> Iterator[ConversationServer]:
    made = ConversationServer(drawn, SAMPLING)
    yield made
    made.close()


@pytest.fixture
def key(server: ConversationServer) -> str:
    conversation: Any = object()
    return server.open(conversation)


def knock(server: ConversationServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server._http.server_port), timeout=SOON)


def told(
    server: ConversationServer, key: str, length: str, body: bytes = b"", ends: bool = True
) -> tuple[int, str]:
    """Status and message for a request, behind which the server hangs up if it `ends`."""
    with knock(server) as line:
        line.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\n"
            + f"Authorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n".encode()
            + body
        )
        if not ends:
            line.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(partial(line.recv, 1 << 16), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert (b"Connection: close" in head) == ends
    return int(head.split()[1]), json.loads(content)["error"]["message"]


def test_a_request_with_a_key_is_read(server: ConversationServer, key: str) -> None:
    status, message = told(server, key, str(len(BODY)), BODY, ends=False)
    assert status == 400
    assert message.startswith("temperature is 1.0 in the recipe")


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("-1", 400), ("abc", 400), ("", 400), ("1_0", 400), ("+5", 400), ("9" * 5000, 400),
        (str(MAX_BYTES + 1), 413),
    ],
)  # fmt: skip
def test_a_length_that_is_none_is_refused_and_nothing_is_read(
    server: ConversationServer,
    key: str,
    length: str,
    status: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert told(server, key, length) == (status, f"Content-Length must be 0 to {MAX_BYTES}")
    server.close()
    assert capfd.readouterr() == ("", "")


def test_a_body_in_chunks_is_refused_by_its_name(server: ConversationServer, key: str) -> None:
    """It was called no JSON, and its chunks were read as requests that follow it."""
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    status, message = told(server, key, "0\r\nTransfer-Encoding: chunked", chunk)
    assert (status, message.startswith("Transfer-Encoding is not served")) == (411, True)


@pytest.mark.parametrize("length", ["-1", "abc", "0", str(10**15)])
def test_without_a_key_nothing_is_read(server: ConversationServer, length: str) -> None:
    assert told(server, "guessed", length) == (401, "no conversation has this key")


@pytest.mark.parametrize("said", ["", "POST /v1/chat/", "WITH KEY"])
def test_a_caller_that_says_nothing_more_is_let_go(
    server: ConversationServer, key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had held a thread as long as it liked."""
    assert endpoint._ConversationHandler.timeout <= 30
    monkeypatch.setattr(endpoint._ConversationHandler, "timeout", 0.1)
    head = f"POST / HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Length: 9\r\n\r\n"
    with knock(server) as line:
        line.sendall((head if said == "WITH KEY" else said).encode())
        assert line.recv(1) == b""


def test_strangers_hold_up_nobody(
    server: ConversationServer,
    key: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint._ConversationHandler, "timeout", PATIENCE)

    def visit() -> None:
        status, _ = told(server, key, str(len(BODY)), BODY, ends=False)
        assert status == 400

    check_nobody_waits(visit, partial(knock, server))
    server.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "body",
    [{"messages": 5}, {"messages": [5]}, {"messages": [], "tools": 5}, {"tools": ["x"]}],
)
def test_a_request_of_another_form_is_told_so(
    server: ConversationServer, key: str, body: dict[str, Any]
) -> None:
    sent = json.dumps(body).encode()
    status, message = told(server, key, str(len(sent)), sent, ends=False)
    assert (status, "must be a list of objects" in message) == (400, True)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "half: \ud83d"}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "\udc00"}]},
    ],
)
def test_half_of_a_surrogate_pair_is_told_so(
    server: ConversationServer,
    key: str,
    body: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The tokenizer's TypeError cut the connection, and the client asked again and again."""
    sent = json.dumps(body).encode()
    status, message = told(server, key, str(len(sent)), sent, ends=False)
    assert (status, "half of a surrogate pair" in message) == (400, True)
    assert capfd.readouterr() == ("", "")


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.5}, {"presence_penalty": -1}, {"logprobs": True},
        {"top_logprobs": 3}, {"response_format": {"type": "json_object"}}, {"top_k": 20},
        {"min_p": 0.1}, {"tool_choice": "none", "tools": [FUNCTION]},
        {"functions": [{"name": "f"}]}, {"repetition_penalty": 1.2}, {"min_tokens": 5},
        {"ignore_eos": True}, {"stop_token_ids": [7]},
        {"chat_template_kwargs": {"enable_thinking": False}}, {"parallel_tool_calls": False},
        {"reasoning_effort": "low"}, {"structured_outputs": {"choice": ["a"]}},
        {"guided_json": {"type": "object"}}, {"guided_regex": "a+"}, {"guided_choice": ["a"]},
        {"guided_grammar": "root ::= 'a'"}, {"regex": "a+"}, {"ebnf": "root ::= 'a'"},
        {"bad_words": ["a"]}, {"allowed_token_ids": [7]}, {"use_beam_search": True},
        {"continue_final_message": True}, {"add_generation_prompt": False},
        {"chat_template": "{{ messages }}"}, {"truncate_prompt_tokens": 9},
    ],
)  # fmt: skip
def test_what_would_draw_otherwise_is_refused(
    server: ConversationServer, key: str, asked: dict[str, Any]
) -> None:
    """It had been passed over."""
    sent = json.dumps({"messages": [], **asked}).encode()
    status, message = told(server, key, str(len(sent)), sent, ends=False)
    assert (status, message.startswith(next(iter(asked)))) == (400, True)


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.0, "presence_penalty": 0, "logprobs": False, "top_logprobs": None},
        {"response_format": {"type": "text"}, "n": 1, "stop": None, "logit_bias": {}},
        {"tool_choice": "auto", "tools": [FUNCTION], "parallel_tool_calls": True},
        {"tool_choice": "required", "tools": [FUNCTION]},
        {"tool_choice": None, "tools": [FUNCTION]},
        {"tool_choice": "none"},
        {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0},
        {"repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": []},
        {"functions": None, "chat_template_kwargs": {}, "seed": 5},
    ],
)
def test_what_frameworks_say_without_a_wish_is_no_mistake(
    server: ConversationServer, asked: dict[str, Any]
) -> None:
    assert server._checked(asked) is None


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        ({"max_tokens": 5}, 5), ({"max_completion_tokens": 4, "max_tokens": 5}, 4),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_completion_tokens": 0, "max_tokens": 5}, None), ({"max_tokens": 0}, None),
        ({"max_tokens": True}, None), ({"max_tokens": 5.0}, None), ({"max_tokens": "5"}, None),
    ],
)  # fmt: skip
def test_a_length_that_is_no_number_of_tokens_is_refused(
    server: ConversationServer, asked: dict[str, Any], limit: int | None
) -> None:
    """None of it, beside another one, was passed over."""
    if limit is not None:
        assert server._checked(asked) == limit
        return
    with pytest.raises(endpoint.RefusedRequest, match="must be 1 or more"):
        server._checked(asked)


def test_a_caller_that_leaves_before_its_reply_is_no_news(
    key: str, server: ConversationServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each agent whose client waited no longer left a traceback on the terminal."""
    begun, go = threading.Event(), threading.Event()

    def complete(*_: Any) -> dict[str, Any]:
        begun.set()
        assert go.wait(60)
        return {}

    server.complete = complete  # type: ignore[method-assign]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
    with knock(server) as line:
        line.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
        assert begun.wait(60)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handlers = [one for one in threading.enumerate() if "process_request" in one.name]
    go.set()
    for handler in handlers:
        handler.join(60)
    server.close()
    assert handlers
    assert capfd.readouterr() == ("", "")
