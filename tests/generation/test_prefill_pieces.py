"""Long prompts are prefilled in pieces: running answers go on, and draws are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Request, SamplingParams
from tests.generation.small_models import CONTEXT, VOCAB_SIZE, drain, small_model

MODEL, OTHER = small_model(), small_model(seed=1)
RNG = random.Random(1)
LONG = [RNG.randrange(VOCAB_SIZE) for _ in range(40)]


def engine_with(model: Any = MODEL, **limits: Any) -> NativeEngine:
    engine = NativeEngine(model.config, dtype=torch.float64, **limits)
    engine.install(model.state_dict(), 0)
    return engine


def asked(number: int, ids: list[int], new: int = 5) -> Request:
    return Request(number, ids, number, SamplingParams(new, 1.0))


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3"])
@pytest.mark.parametrize("tokens", [1, 7, 39, 40])
def test_pieces_of_any_size_draw_the_same(name: str, tokens: int) -> None:
    model = small_model(name)
    requests = [asked(0, LONG, 8), asked(1, LONG[:3]), asked(2, LONG, 6), asked(3, LONG[:20], 9)]
    whole, pieces = engine_with(model), engine_with(model, prefill_tokens=tokens)
    for engine in (whole, pieces):
        engine.submit(requests)
    expected, found = drain(whole), drain(pieces)
    for number, done in found.items():
        assert done.token_ids.tolist() == expected[number].token_ids.tolist()
        torch.testing.assert_close(done.logprobs, expected[number].logprobs, atol=1e-10, rtol=0)


def test_running_answers_go_on_while_a_long_prompt_is_read() -> None:
    engine = engine_with(prefill_tokens=8)
    engine.submit([asked(0, [1, 2], 7)])
    engine.step()
    engine.submit([asked(1, LONG)])
    done = [engine.step() for _ in range(6)]
    assert [one.id for some in done for one in some] == [0]
    assert engine.num_running == 1  # its fifth piece was the last, with the fifth of these steps
    assert sorted(drain(engine)) == [1]


def test_no_step_computes_more_than_its_share_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(prefill_tokens=16)
    sizes: list[int] = []
    prefill = engine._decoder.prefill

    def counted(prompts: Any, first: int = 0, kv: Any = None) -> Any:
        sizes.append(sum(len(prompt) - first for prompt in prompts))
        return prefill(prompts, first, kv)

    monkeypatch.setattr(engine._decoder, "prefill", counted)
    prompts = [LONG, LONG[:9], LONG[:5], LONG[:39], LONG[:1], LONG[:16], LONG[:17]]
    engine.submit(asked(number, ids) for number, ids in enumerate(prompts))
    while engine.busy:
        before = len(sizes)
        engine.step()
        assert sum(sizes[before:]) <= 16
    assert sum(sizes) == sum(map(len, prompts)), "and none is computed twice"


def test_an_install_begins_half_read_prompts_again() -> None:
    engine = engine_with(prefill_tokens=8)
    engine.submit([asked(0, LONG)])
    engine.step()
    engine.step()
    engine.install(OTHER.state_dict(), 3)
    done = drain(engine)[0]
    fresh = engine_with(OTHER)
    fresh.submit([asked(0, LONG)])
    assert done.token_ids.tolist() == drain(fresh)[0].token_ids.tolist()
    assert done.token_versions.tolist() == [3] * 5


def test_nothing_stays_of_requests_that_are_dropped_half_read() -> None:
    engine = engine_with(prefill_tokens=8)
    empty = engine.state_bytes()
    engine.submit([asked(0, LONG), asked(1, LONG), asked(2, LONG[:39])])
    engine.step()
    assert engine.state_bytes() > empty
    engine.sleep()
    engine.wake()
    engine.step()
    engine.abort([0, 1, 2])
    assert not engine.busy
    assert not engine._prefixes._begun
    assert not engine._prefixes._kept
    assert engine.state_bytes() == empty


def test_half_read_requests_under_a_tight_cache() -> None:
    """Who is put off and read again in pieces draws the same."""
    requests = [asked(number, LONG[number : number + 12], 30) for number in range(6)]
    free = engine_with()
    free.submit(requests)
    expected = drain(free)
    cell_bytes = 2 * 2 * 2 * 8 * 8
    tight = engine_with(prefill_tokens=5, cache_bytes=3 * CONTEXT * cell_bytes)
    tight.submit(requests)
    found = drain(tight)
    assert tight.preemptions > 0
    for number, done in found.items():
        assert done.token_ids.tolist() == expected[number].token_ids.tolist()
