"""Decode steps as CUDA graphs, on a real device; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from m2flow.generation.captured import CudaCapture
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion, Request, SamplingParams
from tests.generation.small_models import CONTEXT, drain, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = torch.device("cuda:0")
NAMES = ("qwen2", "qwen3", "mistral-window", "gemma2")


def engine_of(model: Any, dtype: torch.dtype, captured: bool) -> NativeEngine:
    engine = NativeEngine(
        model.config,
        dtype=dtype,
        device=DEVICE,
        max_running=20,
        capture=CudaCapture(DEVICE) if captured else None,
    )
    engine.install(model.state_dict(), 0)
    return engine


def requests() -> list[Request]:
    return [
        Request(i, [i % 7 + 1] * (1 + i % 5), 50 + i, SamplingParams(CONTEXT - 8 - i % 3))
        for i in range(26)
    ]


def drawn(engine: NativeEngine, naps: bool) -> dict[int, Completion]:
    engine.submit(requests())
    done: dict[int, Completion] = {}
    for step in range(1000):
        if naps and step in (9, 30):
            engine.sleep()
            engine.wake()
        done |= {one.id: one for one in engine.step()}
        if not engine.busy:
            return done
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("naps", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_graphs_draw_what_plain_steps_draw(name: str, naps: bool) -> None:
    """Exact in float64, where rounding parts no draws; naps move weights, keys and values."""
    model = small_model(name)
    expected = drawn(engine_of(model, torch.float64, False), naps=False)
    engine = engine_of(model, torch.float64, True)
    found = drawn(engine, naps)
    assert engine.captured is not None
    assert engine.captured.replayed > engine.captured.recorded > 0
    for number, done in found.items():
        assert done.token_ids.tolist() == expected[number].token_ids.tolist()
        torch.testing.assert_close(done.logprobs, expected[number].logprobs, atol=1e-9, rtol=0)


def test_the_host_waits_for_tokens_alone() -> None:
    """Rows come, go and move, prompts are read: all of it is given to the device at once."""
    model = small_model()
    engine = engine_of(model, torch.bfloat16, True)
    found = drawn(engine, naps=False)  # kernels are compiled, and sizes known
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # an event, such as that of tokens, may be waited for
    try:
        again = drawn(engine, naps=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again.keys() == found.keys()


def test_log_probabilities_in_bfloat16_are_those_of_plain_steps() -> None:
    """Greedy on the same tokens for as long as both draw the same."""
    model, gaps = small_model(), []
    both = [drain_greedy(engine_of(model, torch.bfloat16, on)) for on in (False, True)]
    for number, plain in both[0].items():
        replayed = both[1][number]
        for one, other, a, b in zip(
            plain.token_ids, replayed.token_ids, plain.logprobs, replayed.logprobs, strict=False
        ):
            if one != other:
                break
            gaps.append(abs(float(a - b)))
    assert len(gaps) > 20
    assert max(gaps) < 0.1


def drain_greedy(engine: NativeEngine) -> dict[int, Completion]:
    engine.submit([Request(i, [i + 1, 5], i, SamplingParams(30, 0.0)) for i in range(9)])
    return drain(engine)
