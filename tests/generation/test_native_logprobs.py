"""What the native engine computes is what transformers computes, for every architecture."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, MambaConfig, Qwen2Config, Qwen3MoeConfig

from m2flow.errors import UserError
from m2flow.generation.architecture import architecture_of
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion, Request, SamplingParams
from m2flow.generation.supported import check_supported
from tests.generation.small_models import (
    CONFIGS,
    CONTEXT,
    VOCAB_SIZE,
    drain,
    forward_logprobs,
    small_model,
)

FLOAT64_TOLERANCE = 1e-10


def requests(count: int, temperature: float = 1.0, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 20 tokens, two requests each."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 5, 20)))]
        for _ in range(count // 2)
    ]
    return [
        Request(
            i, prompts[i // 2], rng.getrandbits(62), SamplingParams(rng.randint(1, 20), temperature)
        )
        for i in range(count)
    ]


def generate(model, wanted: list[Request], dtype: torch.dtype) -> dict[int, Completion]:  # type: ignore[no-untyped-def]
    engine = NativeEngine(model.config, max_running=5, dtype=dtype)
    engine.install(model.state_dict(), 0)
    engine.submit(wanted)
    return drain(engine)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        (name, *case)
        for name in CONFIGS
        for case in ((torch.float64, None), (torch.float32, 1e-4), (torch.bfloat16, 0.2))
        # In bfloat16 a last bit may choose another expert: see the test after this one.
        if case[0] is not torch.bfloat16 or "moe" not in name
    ],
)
def test_logprobs_are_those_of_a_full_forward(
    name: str, dtype: torch.dtype, tolerance: float | None
) -> None:
    tolerance = tolerance or FLOAT64_TOLERANCE
    model = small_model(name, dtype=dtype)
    wanted = requests(12)
    done = generate(model, wanted, dtype)
    for request in wanted:
        completion = done[request.id]
        assert completion.token_ids.dtype == torch.int64
        assert completion.logprobs.dtype == (dtype if dtype.itemsize >= 4 else torch.float32)
        expected = forward_logprobs(model, request, completion).to(completion.logprobs)
        torch.testing.assert_close(completion.logprobs, expected, atol=tolerance, rtol=0)


def test_a_mixture_in_bfloat16_mostly_chooses_the_same_experts() -> None:
    """Where it does not, a token's log-probability differs; the median one does not."""
    model = small_model("qwen3-moe", dtype=torch.bfloat16)
    wanted = requests(12)
    done = generate(model, wanted, torch.bfloat16)
    gaps = torch.cat(
        [
            (done[one.id].logprobs - forward_logprobs(model, one, done[one.id])).abs()
            for one in wanted
        ]
    )
    assert float(gaps.median()) < 0.02


def test_logprobs_of_wide_batches_through_the_compiled_kernels() -> None:
    model = small_model(dtype=torch.float32)
    wanted = requests(80)
    engine = NativeEngine(model.config, max_running=64)
    engine.install(model.state_dict(), 0)
    engine.submit(wanted)
    done = drain(engine)
    for request in wanted:
        expected = forward_logprobs(model, request, done[request.id]).float()
        torch.testing.assert_close(done[request.id].logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_logprobs_are_under_the_temperature(temperature: float) -> None:
    model = small_model()
    wanted = requests(6, temperature)
    done = generate(model, wanted, torch.float64)
    for request in wanted:
        expected = forward_logprobs(model, request, done[request.id])
        torch.testing.assert_close(done[request.id].logprobs, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_the_greedy_of_transformers(name: str) -> None:
    model = small_model(name)
    wanted = requests(8, temperature=0)
    done = generate(model, wanted, torch.float64)
    for request in wanted:
        prompt = torch.tensor([request.prompt_ids])
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.params.max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert done[request.id].token_ids.tolist() == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["llama-biases-scaled-rope", "qwen3", "qwen2-untied-one-kv-head"])
def test_every_installed_parameter_counts(name: str) -> None:
    """Fused copies and tied heads go stale without a word where an install forgets one."""
    model = small_model(name)
    engine = NativeEngine(model.config, dtype=torch.float64)
    request = Request(0, [3, 1, 4, 1, 5], 7, SamplingParams(4))
    weights = dict(model.named_parameters())
    for version, (parameter_name, parameter) in enumerate(weights.items()):
        with torch.no_grad():
            parameter += 0.2 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(version)
            )
        before = drain_one(engine, request) if version else None
        engine.install(weights, version)
        after = drain_one(engine, request)
        expected = forward_logprobs(model, request, after)
        torch.testing.assert_close(after.logprobs, expected, atol=FLOAT64_TOLERANCE, rtol=0)
        if before is not None:
            assert not torch.equal(before.logprobs, after.logprobs), parameter_name


def drain_one(engine: NativeEngine, request: Request) -> Completion:
    engine.submit([request])
    return drain(engine)[request.id]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (GemmaConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (MambaConfig(), "model_type"),
        (
            Qwen2Config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type",
        ),
    ],
)
def test_what_would_be_computed_differently_is_refused(config, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=f"^{key}"):
        NativeEngine(config)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(mlp_only_layers=[1]),
        Qwen3MoeConfig(decoder_sparse_step=2),
        Qwen2Config(hidden_act="gelu"),
    ],
)
def test_what_the_decoder_does_not_compute_is_left_to_transformers(config: Any) -> None:
    assert check_supported(config.to_dict()) is not None
    with pytest.raises(UserError):
        architecture_of(config)


def test_the_longest_request_fits_the_context_to_the_last_column() -> None:
    model = small_model()
    request = Request(0, list(range(8)), 1, SamplingParams(CONTEXT - 8))
    completion = generate(model, [request], torch.float64)[0]
    assert len(completion.token_ids) == CONTEXT - 8
    expected = forward_logprobs(model, request, completion)
    torch.testing.assert_close(completion.logprobs, expected, atol=1e-10, rtol=0)
