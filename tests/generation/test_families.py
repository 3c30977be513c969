"""Windows, caps, norms and rotations of model families: transformers' tokens, exactly."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import Gemma2ForCausalLM

from m2flow.generation import attention, kernels, kv_cache
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion, Request, SamplingParams
from tests.generation.small_models import (
    CONFIGS,
    CONTEXT,
    FAMILIES,
    VOCAB_SIZE,
    drain,
    forward_logprobs,
    small_model,
)

TOLERANCE = {"gemma2": 1e-5}
"""transformers has the softmax of Gemma 2 in float32 whatever the model's dtype is."""


@pytest.fixture(autouse=True)
def _as_with_many_rows_and_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "CPU_SPAN", 2)
    monkeypatch.setattr(kv_cache, "WORTH", 0)
    monkeypatch.setattr(kernels, "_MIN_PREPACKED", 0)


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Shorter and longer than any window."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, 2, 5, 6, 7, 11, 20, 30)) for _ in range(count)]
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def drawn(
    model: Any, asked: list[Request], dtype: torch.dtype = torch.float64, **limits: Any
) -> dict[int, Completion]:
    engine = NativeEngine(model.config, dtype=dtype, **limits)
    engine.install(model.state_dict(), 0)
    engine.submit(asked)
    return drain(engine)


def check_greedy(name: str, count: int) -> None:
    """Greedy tokens are those of `generate`, whose batch has one prompt."""
    model = small_model(name)
    asked = [Request(i, ids, i, SamplingParams(18, 0.0)) for i, ids in enumerate(prompts(count))]
    done = drawn(model, asked, max_running=7)
    for one in asked:
        ids = torch.tensor([one.prompt_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=18, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert done[one.id].token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


def test_the_reference_caps_scores_though_transformers_prefers_sdpa(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)
    assert small_model("gemma2").config._attn_implementation == "eager"


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(name: str) -> None:
    check_greedy(name, count=4)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model = small_model(name, dtype=dtype)
        asked = [
            Request(i, ids, i, SamplingParams(1 + i, 1.0)) for i, ids in enumerate(prompts(12))
        ]
        done = drawn(model, asked, dtype, max_running=5)
        for one in asked:
            expected = forward_logprobs(model, one, done[one.id]).to(dtype)
            bound = max(tolerance, TOLERANCE.get(name, 0.0))
            torch.testing.assert_close(done[one.id].logprobs, expected, atol=bound, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *FAMILIES])
def test_200_greedy_answers_are_those_of_transformers(name: str) -> None:
    check_greedy(name, count=200)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_most_tokens_are_close(name: str) -> None:
    """A random model turns a last bit into a difference; the median shows that no term is lost."""
    model = small_model(name, dtype=torch.bfloat16)
    asked = [Request(i, ids, i, SamplingParams(12, 1.0)) for i, ids in enumerate(prompts(8))]
    done = drawn(model, asked, torch.bfloat16)
    gaps = [done[one.id].logprobs - forward_logprobs(model, one, done[one.id]) for one in asked]
    assert float(torch.cat(gaps).abs().median()) < 0.03


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen2-windows"])
def test_blocks_of_queries_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(name)
    asked = [Request(i, ids, i, SamplingParams(3, 1.0)) for i, ids in enumerate(prompts(8))]
    whole = drawn(model, asked)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    for one in drawn(model, asked).values():
        torch.testing.assert_close(one.logprobs, whole[one.id].logprobs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "mistral-window"])
def test_windows_under_a_tight_cache(name: str) -> None:
    """Rows that move, wait and come back see the same tokens."""
    model = small_model(name)
    asked = [Request(i, ids, i, SamplingParams(15, 1.0)) for i, ids in enumerate(prompts(9))]
    free = drawn(model, asked)
    cells = 2 * CONTEXT
    cell_bytes = 2 * 2 * 2 * (12 if name == "gemma2" else 8) * 8
    tight = drawn(model, asked, max_running=4, cache_bytes=cells * cell_bytes)
    for one in tight.values():
        assert one.token_ids.tolist() == free[one.id].token_ids.tolist()
