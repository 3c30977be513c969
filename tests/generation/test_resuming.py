"""An aborted request goes on in another engine, and draws what the first one would have drawn."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.generation.native import NativeEngine
from m2flow.generation.protocol import Completion, Request, SamplingParams
from tests.generation.small_models import CONTEXT, VOCAB_SIZE, drain, small_model

MODEL = small_model()
STOP = 3


def engine(version: int = 4, dtype: torch.dtype = torch.float64, **limits: int) -> NativeEngine:
    made = NativeEngine(MODEL.config, dtype=dtype, **limits)  # type: ignore[arg-type]
    made.install(MODEL.state_dict(), version)
    return made


def requests(count: int = 12) -> list[Request]:
    """Groups of three with a common prompt; some end by the stop token, some by their limit."""
    dice = random.Random(3)
    made = []
    for index in range(count):
        if index % 3 == 0:
            prompt = [dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 9))]
        temperature = dice.choice((0.0, 0.7, 1.0))
        params = SamplingParams(CONTEXT - 10, temperature, (STOP,) if index % 2 else ())
        made.append(Request(index, prompt, 500 + index, params))
    return made


def whole() -> dict[int, Completion]:
    one = engine()
    one.submit(requests())
    return drain(one)


WHOLE = whole()


@settings(deadline=None, max_examples=25)
@given(stops=st.lists(st.integers(0, 30), max_size=4), max_running=st.integers(1, 12))
def test_however_often_it_moves_a_request_draws_the_same(
    stops: list[int], max_running: int
) -> None:
    done: dict[int, Completion] = {}
    pending = requests()
    for steps in stops:
        one = engine(max_running=max_running)
        one.submit(pending)
        for _ in range(steps):
            done |= {completion.id: completion for completion in one.step()}
        begun = {c.id: c for c in one.abort(request.id for request in pending)}
        assert not one.busy
        assert one.num_running == one.num_waiting == 0
        pending = [replace(r, begun=begun[r.id]) for r in pending if r.id in begun]
        for request in pending:
            assert begun[request.id].finish_reason == "abort"
    last = engine(version=6)
    last.submit(pending)
    done |= drain(last)
    assert done.keys() == WHOLE.keys()
    for number, completion in done.items():
        assert completion.token_ids.tolist() == WHOLE[number].token_ids.tolist()
        torch.testing.assert_close(completion.logprobs, WHOLE[number].logprobs, atol=1e-10, rtol=0)
        assert completion.finish_reason == WHOLE[number].finish_reason


def test_what_was_drawn_before_keeps_its_bits_and_its_version() -> None:
    one = engine(version=4, dtype=torch.float32)
    one.submit(requests()[:1])
    for _ in range(5):
        one.step()
    (begun,) = one.abort([0])
    assert begun.versions == (4, 4)
    assert len(begun.token_ids) == 5
    other = engine(version=6, dtype=torch.float32)
    other.submit([replace(requests()[0], begun=begun)])
    other.install(small_model(seed=1).state_dict(), 7)
    done = drain(other)[0]
    assert torch.equal(done.logprobs[:5], begun.logprobs)
    assert torch.equal(done.token_ids[:5], begun.token_ids)
    assert done.versions == (4, 7), "version 6 has drawn nothing"


def test_a_request_that_was_never_begun_takes_the_version_of_who_draws_it() -> None:
    one = engine(version=4, max_running=1)
    one.submit(requests()[:2])
    one.step()
    begun = one.abort([1])[0]
    assert len(begun.token_ids) == 0
    other = engine(version=6)
    other.submit([replace(requests()[1], begun=begun)])
    done = drain(other)[1]
    assert done.versions == (6, 6)
    assert done.token_ids.tolist() == WHOLE[1].token_ids.tolist()


def test_abort_frees_the_slots_for_those_who_wait() -> None:
    one = engine(max_running=3)
    one.submit(requests()[:6])
    one.step()
    assert (one.num_running, one.num_waiting) == (3, 3)
    one.abort([0, 1])
    one.step()
    assert (one.num_running, one.num_waiting) == (3, 1)


@pytest.mark.parametrize("kind", ["stopped", "full", "foreign"])
def test_a_request_with_nothing_left_to_draw_is_refused(kind: str) -> None:
    request = requests()[1]
    tokens = {"stopped": [5, STOP], "full": [5] * (CONTEXT - 10), "foreign": [VOCAB_SIZE]}[kind]
    begun = Completion(1, torch.tensor(tokens), torch.zeros(len(tokens)), (4, 4), "abort")
    with pytest.raises(UserError, match="nothing is left to draw"):
        engine().submit([replace(request, begun=begun)])
