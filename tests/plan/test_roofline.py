"""Analytic seconds: against slow oracles, known limits, and what must never happen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.plan.analytic_work import Answers
from m2flow.plan.embodied_models import OPENVLA, OPENVLA_OFT
from m2flow.plan.hardware import DEVICES, Device
from m2flow.plan.lognormal import fit_lengths
from m2flow.plan.models import KNOWN_MODELS
from m2flow.plan.roofline import (
    Layout,
    Rates,
    action_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    decode_step_seconds,
    fullest,
    host_copy_seconds,
    log_probability_seconds,
    prefill_seconds,
    publish_seconds,
    training_seconds,
)

H100, H200, L40S = DEVICES["H100"], DEVICES["H200"], DEVICES["L40S"]
QWEN, MOE = KNOWN_MODELS["Qwen2.5-7B"], KNOWN_MODELS["Qwen3-30B-A3B"]
RATES = Rates()


def test_decoding_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    slow_memory = replace(H100, memory_bytes_per_second=H100.memory_bytes_per_second / 2)
    slow_arithmetic = replace(H100, flops_per_second=H100.flops_per_second / 2)

    def decode(device: Device) -> float:
        return decode_step_seconds(QWEN, 32, 32 * 4000, device, Layout(), RATES)

    def prefill(device: Device) -> float:
        return prefill_seconds(QWEN, 8192, 4096, device, Layout(), RATES)

    assert decode(slow_memory) > 1.5 * decode(H100)
    assert decode(slow_arithmetic) == decode(H100)
    assert prefill(slow_arithmetic) == pytest.approx(2 * prefill(H100))
    assert prefill(slow_memory) == prefill(H100)
    assert decode(H200) < decode(H100) < decode(L40S)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 512), st.integers(0, 30_000), st.sampled_from([1, 2, 4]))
def test_a_decoding_step_never_gets_cheaper_by_more_work(
    running: int, context: int, tensor: int
) -> None:
    for model in (QWEN, MOE):
        here = decode_step_seconds(model, running, running * context, H100, Layout(tensor), RATES)
        more = decode_step_seconds(
            model, running + 1, (running + 1) * context, H100, Layout(tensor), RATES
        )
        longer = decode_step_seconds(
            model, running, running * (context + 1), H100, Layout(tensor), RATES
        )
        assert here <= more + 1e-12
        assert here <= longer + 1e-12


@pytest.mark.parametrize(("tensor", "heads"), [(2, 2), (4, 1), (8, 1)])
def test_a_decoding_step_on_several_lanes_by_hand(tensor: int, heads: int) -> None:
    """Weights and whole heads of the cache dealt out, and two sums over the lanes a layer."""
    running, kv_tokens = 16, 16 * 3000
    weights = MOE.weight_bytes_read(running) / tensor
    cache = kv_tokens * 2 * MOE.layers * heads * MOE.head_dim * 2
    bandwidth = 3350e9 * RATES.bandwidth(MOE)
    ring = 2 * (tensor - 1) / tensor * running * MOE.hidden * 2 / (0.8 * 450e9)
    wires = 2 * MOE.layers * (10e-6 + ring)
    step = decode_step_seconds(MOE, running, kv_tokens, H100, Layout(tensor), RATES)
    assert step == pytest.approx(1.5e-3 + (weights + cache) / bandwidth + wires)


def test_training_is_six_flops_for_each_parameter_and_token() -> None:
    tokens = 1e6
    seconds = training_seconds(
        QWEN, tokens, 0, 1, H100, Layout(), Rates(training=0.5), updates=0, recomputes=False
    )
    assert seconds == pytest.approx(6 * QWEN.active_parameters * tokens / (0.5 * 989.5e12))
    again = training_seconds(QWEN, tokens, 0, 1, H100, Layout(), Rates(training=0.5), updates=0)
    assert again == pytest.approx(seconds * 8 / 6)


def test_the_default_rates_give_the_step_they_are_fitted_to() -> None:
    """GRPO on a 7B model, 64 H100: 102 s of log-probabilities, 368 s of training."""
    answers = Answers(150, fit_lengths(7502, 27_648))
    count = 512 * 32
    shape = (count * answers.tokens, answers.context, 64, H100, Layout(4), RATES, count)
    forward = log_probability_seconds(QWEN, *shape, answers.deviation)
    assert forward == pytest.approx(102, rel=0.01)
    training = training_seconds(QWEN, *shape, answers.deviation, updates=4)
    assert training == pytest.approx(368, rel=0.01)


def test_communication() -> None:
    assert all_reduce_seconds(1e9, 1, H100) == all_to_all_seconds(1e9, 1, H100) == 0
    assert all_reduce_seconds(1e9, 8, H100) == pytest.approx(2 * 7 / 8 * 1e9 / (0.8 * 450e9))
    assert all_to_all_seconds(1e9, 8, H100) == all_reduce_seconds(1e9, 8, H100) / 2
    assert all_reduce_seconds(1e9, 16, H100) > 5 * all_reduce_seconds(1e9, 8, H100)
    assert host_copy_seconds(63e9, H100) == pytest.approx(1 / 0.8)
    near, far = (
        publish_seconds(QWEN.weight_bytes, H100, H100, Layout(2), same_lanes)
        for same_lanes in (True, False)
    )
    assert 0 < near < far < 1
    spread = training_seconds(MOE, 1e6, 0, 32, H100, Layout(4, 1, 4), RATES, 100)
    alone = training_seconds(MOE, 1e6, 0, 32, H100, Layout(4, 1, 1), RATES, 100)
    assert spread > alone


def test_the_fullest_rank_by_drawing() -> None:
    random_ = random.Random(1)
    ranks, sequences, deviation = 16, 64, 0.7
    largest = [
        max(
            sum(random_.gauss(1, deviation) for _ in range(sequences)) / sequences
            for _ in range(ranks)
        )
        for _ in range(200)
    ]
    assert fullest(ranks, sequences, deviation) == pytest.approx(sum(largest) / 200, rel=0.02)
    assert fullest(1, 64, 0.7) == 1


def test_one_answer_does_not_get_faster_by_idle_replicas() -> None:
    def seconds(lanes: int, count: int) -> float:
        shape = (count * 1000, 500, lanes, H100, Layout(2), RATES, count)
        return log_probability_seconds(QWEN, *shape)

    assert seconds(8, 1) == seconds(2, 1)
    assert seconds(8, 4) == seconds(2, 1)
    assert seconds(8, 8) == pytest.approx(2 * seconds(2, 1))


# Published figures that constants are taken from --------------------------------------------------


def test_training_small_experts_is_what_was_measured() -> None:
    """NVIDIA's performance summary of Megatron Bridge 25.11: 5,275 tokens/s for each of 16 H100."""
    tokens, layout = 512 * 4096, Layout(1, 2, 8)
    seconds = training_seconds(
        MOE, tokens, 2048, 16, H100, layout, RATES, 512, 0, updates=1, recomputes=False
    )
    assert tokens / seconds / 16 == pytest.approx(5275, rel=0.03)


def test_one_request_to_small_experts_is_what_was_measured() -> None:
    """9.7 ms a token of Qwen3-30B-A3B on A100 (tenstorrent/tt-inference-server, thread 340)."""
    step = decode_step_seconds(MOE, 1, 640, DEVICES["A100-80GB"], Layout(), RATES)
    assert step == pytest.approx(9.7e-3, rel=0.05)


@pytest.mark.parametrize(("envs", "seconds"), [(10, 0.40), (20, 0.60), (30, 0.85), (40, 1.15)])
def test_acting_is_what_was_measured(envs: int, seconds: float) -> None:
    """What the tests of RLinf's public repository have for OpenVLA in ManiSkill."""
    assert action_seconds(OPENVLA, envs, H100, RATES) == pytest.approx(seconds, rel=0.1)
    assert action_seconds(OPENVLA_OFT, envs, H100, RATES) < seconds  # one pass, not seven
