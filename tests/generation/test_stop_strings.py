"""Stop strings end a completion at the token in which one of them becomes whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion, Request, SamplingParams
from m2flow.generation.stop_strings import StopStrings, TextOf
from m2flow.models.tokenizer import byte_tokenizer
from tests.generation.small_models import VOCAB_SIZE, drain, small_model

BYTES = byte_tokenizer()
PIECES = ("a", "b", "ab", "\n", " a", "User", ":", "é", "aa", "")


def of_bytes(ids: Sequence[int]) -> str:
    return str(BYTES.decode(list(ids), skip_special_tokens=True))


def of_pieces(ids: Sequence[int]) -> str:
    """As sentence pieces: a space that begins a text is dropped."""
    return "".join(PIECES[token % len(PIECES)] for token in ids).removeprefix(" ")


def slowly(tokens: Sequence[int], strings: Sequence[str], text_of: TextOf) -> int | None:
    """The number of tokens after which all of the text has one of the strings."""
    for end in range(1, len(tokens) + 1):
        text = text_of(tokens[:end])
        if any(string in text for string in strings):
            return end
    return None


def watched(tokens: Sequence[int], strings: Sequence[str], text_of: TextOf) -> int | None:
    stop = StopStrings(strings, text_of)
    return next((end for end, one in enumerate(tokens, 1) if stop.completed_by(one)), None)


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=120),
    strings=st.lists(
        st.sampled_from(["abab", "User:", "\nUser", "é", "aaaaaaa", "b b", "bé\n"]), min_size=1
    ),
)
def test_pieces_of_several_characters(tokens: list[int], strings: list[str]) -> None:
    assert watched(tokens, strings, of_pieces) == slowly(tokens, strings, of_pieces)


@settings(deadline=None, max_examples=100)
@given(
    text=st.text(alphabet="ab é漢🙂", max_size=60),
    strings=st.lists(st.text(alphabet="ab é漢🙂", min_size=1, max_size=5), min_size=1),
    more=st.lists(st.integers(0, 257), max_size=10),
)
def test_characters_of_several_bytes(text: str, strings: list[str], more: list[int]) -> None:
    """A character is there with its last byte; bytes that are no text, and ends, stop nothing."""
    tokens = [*more, *BYTES.encode(text)]
    assert watched(tokens, strings, of_bytes) == slowly(tokens, strings, of_bytes)


def of_runs(ids: Sequence[int]) -> str:
    """As byte fallback: plain tokens, and runs of bytes that are no text for one wrong byte.

    Token 256 + c is the character c by itself.
    """
    text = ""
    for plain, run in groupby(ids, lambda token: token >= 256):
        tokens = list(run)
        if plain:
            text += "".join(chr(token - 256) for token in tokens)
            continue
        try:
            text += bytes(tokens).decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(tokens)
    return text


def plain(text: str) -> list[int]:
    return [256 + ord(character) for character in text]


@pytest.mark.parametrize(
    ("tokens", "stop", "end"),
    [
        ([*"🙂🙂🙂🙂🛑".encode()], "🛑", 20),
        ([*plain("abcdef"), *"🙂🙂🙂\n\n".encode()], "\n\n", 20),
    ],
)
def test_no_byte_is_cut_off_that_makes_a_run_of_bytes_text(
    tokens: list[int], stop: str, end: int
) -> None:
    assert slowly(tokens, [stop], of_runs) == end
    assert watched([*tokens, *plain("and on")], [stop], of_runs) == end


@settings(deadline=None, max_examples=150)
@given(
    pieces=st.lists(
        st.text(alphabet="ab\né漢🙂", max_size=9).flatmap(
            lambda text: st.sampled_from([plain(text), list(text.encode())])
        ),
        max_size=12,
    ),
    strings=st.lists(st.text(alphabet="ab\né漢🙂", min_size=1, max_size=4), min_size=1),
    wrong=st.lists(st.integers(0, 255), max_size=3),
)
def test_runs_of_bytes_among_plain_tokens(
    pieces: list[list[int]], strings: list[str], wrong: list[int]
) -> None:
    tokens = [*wrong, *(token for piece in pieces for token in piece)]
    assert watched(tokens, strings, of_runs) == slowly(tokens, strings, of_runs)


@pytest.mark.parametrize("character", ["a", "é", "漢", "🙂"])
def test_little_text_is_made_of_runs_of_bytes_too(character: str) -> None:
    sizes: list[int] = []

    def counted(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return of_runs(ids)

    stop = StopStrings(("User:",), counted)
    assert not any(stop.completed_by(byte) for byte in character.encode() * 500)
    assert max(sizes) < 60


def test_little_text_is_made_at_each_token() -> None:
    sizes: list[int] = []

    def counted(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return of_pieces(ids)

    stop = StopStrings(("User:",), counted)
    assert not any(stop.completed_by(0) for _ in range(2000))
    assert max(sizes) < 50


MODEL = small_model()


def drawn(strings: tuple[str, ...], **limits: Any) -> dict[int, Completion]:
    engine = NativeEngine(MODEL.config, dtype=torch.float64, text_of=of_pieces, **limits)
    engine.install(MODEL.state_dict(), 0)
    params = SamplingParams(30, 1.0, stop_strings=strings)
    engine.submit(Request(n, [n % VOCAB_SIZE, 5], n, params) for n in range(12))
    return drain(engine)


@pytest.mark.parametrize("limits", [{}, {"max_running": 2}, {"cache_bytes": 3 * 32 * 512}])
def test_completions_end_where_the_text_does(limits: dict[str, int]) -> None:
    """Whatever else runs, and though requests wait and are computed again."""
    free, strings = drawn(()), ("User:", "a:")
    ended = drawn(strings, **limits)
    reasons = set()
    for number, done in ended.items():
        whole = free[number].token_ids.tolist()
        end = slowly(whole, strings, of_pieces)
        assert done.token_ids.tolist() == whole[:end]
        assert done.finish_reason == ("length" if end is None else "stop")
        assert len(done.logprobs) == len(done.token_versions) == len(done.token_ids)
        reasons.add(done.finish_reason)
    assert reasons == {"stop", "length"}


def test_an_engine_without_text_takes_no_stop_strings() -> None:
    engine = NativeEngine(MODEL.config)
    with pytest.raises(AssertionError, match="without text"):
        engine.submit([Request(0, [1], 0, SamplingParams(2, stop_strings=("a",)))])
