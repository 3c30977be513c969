"""No predicted time is below what a device's peaks allow: bytes over bandwidth, FLOPs over FLOP/s.

The bounds are written out here, from a model's sizes alone.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.models.lengths import Answers, fit_lengths
from m2flow.models.shape import KNOWN_MODELS, ModelShape
from m2flow.models.work import RATES, decoding, forward_pass, prefill, training_pass, update
from m2flow.plan.profile.hardware import DEVICES, Device
from m2flow.training.division import Division

models = st.sampled_from(list(KNOWN_MODELS.values()))
devices = st.sampled_from([device for device in DEVICES.values() if device.kind == "gpu"])
powers = st.sampled_from([1, 2, 4, 8])
MICROBATCH = 16_384


def layer_matrices(model: ModelShape, experts: float) -> float:
    """Parameters of the layers' matrices, so many experts of each mixture counted."""
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    width = experts * model.expert_intermediate if model.experts else model.intermediate
    return model.layers * (attention + 3 * model.hidden * width)


def working_parameters(model: ModelShape) -> float:
    """Parameters that a token meets: the layers' and the head's."""
    return layer_matrices(model, model.experts_per_token) + model.hidden * model.vocabulary


def scores_flops(model: ModelShape, tokens: float, context: float) -> float:
    return 4 * model.layers * model.heads * model.head_dim * tokens * context


def test_a_decoding_step_of_a_7b_model_on_an_a100() -> None:
    """14.1 GB of its 15.2 GB are read, all but the embedding's rows: 6.9 ms at 2.04 TB/s."""
    model, device = KNOWN_MODELS["Qwen2.5-7B"], DEVICES["A100-80GB"]
    read = 2 * working_parameters(model)
    assert read == pytest.approx(14.1e9, rel=0.01)
    step = decoding(model, 1, 1000).on(device)
    assert 6.9e-3 < step < 1.5 * 6.9e-3
    assert step == pytest.approx(8.86e-3, rel=0.01)


def test_a_decoding_step_of_a_mixture_on_an_a100() -> None:
    """6.1 GB of Qwen3-30B-A3B are read for a token: 3.0 ms, where 9.7 ms were measured of an engine
    (tenstorrent/tt-inference-server, thread 340). What that engine did between steps is not priced.
    """
    model, device = KNOWN_MODELS["Qwen3-30B-A3B"], DEVICES["A100-80GB"]
    bound = 2 * working_parameters(model) / 2039e9
    assert bound == pytest.approx(3.0e-3, rel=0.02)
    assert bound < decoding(model, 1, 1000).on(device) < 9.7e-3


@settings(derandomize=True, deadline=None, max_examples=300)
@given(models, devices, st.integers(1, 2048), st.integers(0, 32_768), powers)
def test_decoding(
    model: ModelShape, device: Device, running: int, context: int, lanes: int
) -> None:
    touched = min(model.experts, model.experts_per_token) if model.experts else 0
    weights = 2 * (layer_matrices(model, touched) + model.hidden * model.vocabulary) / lanes
    heads = math.ceil(model.kv_heads / lanes)
    cache = 4 * model.layers * heads * model.head_dim * running * context
    flops = 2 * working_parameters(model) * running + scores_flops(model, running, context)
    seconds = decoding(model, running, running * context, lanes).on(device)
    assert seconds >= (weights + cache) / device.memory_bytes_per_second
    assert seconds >= flops / lanes / device.flops_per_second


@settings(derandomize=True, deadline=None, max_examples=300)
@given(models, devices, st.integers(1, 65_536), powers)
def test_prefill(model: ModelShape, device: Device, tokens: int, lanes: int) -> None:
    matrices = layer_matrices(model, model.experts_per_token)
    flops = 2 * matrices * tokens + scores_flops(model, tokens, tokens / 2)
    seconds = prefill(model, tokens, tokens / 2, lanes).on(device)
    assert seconds >= 2 * matrices / lanes / device.memory_bytes_per_second
    assert seconds >= flops / lanes / device.flops_per_second


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    models, devices, st.integers(1, 4096), st.integers(2, 30_000),
    st.sampled_from(["one", "fsdp8", "tp4", "tp2.fsdp2", "cp4", "ep4"]), st.booleans(),
)  # fmt: skip
def test_passes_over_answers(
    model: ModelShape, device: Device, count: int, longest: int, layout: str, again: bool
) -> None:
    """Weights are read again by the backward pass; so few tokens as one answer's wait for them."""
    division = Division.of(layout, 8 if layout == "fsdp8" else 4) if layout != "one" else Division()
    answers = Answers(20, fit_lengths(0.3 * longest, longest))
    tokens = count * answers.tokens / division.lanes
    flops = 2 * working_parameters(model) * tokens
    flops += scores_flops(model, tokens, answers.context)
    experts = model.experts_per_token / division.ep
    weights = 2 * (layer_matrices(model, experts) + model.hidden * model.vocabulary) / division.tp
    read = weights / device.memory_bytes_per_second
    passing = forward_pass(model, answers, count, division, MICROBATCH).on(device)
    training = training_pass(model, answers, count, division, MICROBATCH, again).on(device)
    assert passing >= max(read, flops / device.flops_per_second)
    assert training >= max(2 * read, 3 * flops / device.flops_per_second)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(models, devices, st.sampled_from([1, 2, 8]), powers)
def test_updates(model: ModelShape, device: Device, lanes: int, replicas: int) -> None:
    """Weight, gradient and two moments are read, and three of them written: 7 numbers of 2 bytes at
    the least."""
    division = Division(fsdp=lanes)
    seconds = update(model, division, replicas).on(device)
    assert seconds >= 14 * model.parameters / lanes / device.memory_bytes_per_second


def test_no_share_of_a_peak_is_above_it() -> None:
    shares = (
        RATES.training, RATES.forward, RATES.grouped, RATES.prefill, RATES.experts,
        RATES.decode_bandwidth,
    )  # fmt: skip
    assert all(0 < share <= 1 for share in shares)
    assert min(RATES.layer_seconds, RATES.prefill_layer_seconds, RATES.round_seconds) >= 0
