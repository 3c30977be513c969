"""The clipped surrogate against a loop over tokens, and the overflows that break others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algorithms.policy_loss import (
    GapRule,
    RatioLevel,
    clipped_policy_loss,
    gap_weights,
)


def loop_loss(
    sequences: list[list[tuple[float, float, float]]],
    low: float,
    high: float,
    dual: float | None,
    level: str,
) -> list[float]:
    """Sequences of (log-probability, old log-probability, advantage)."""
    losses = []
    for sequence in sequences:
        log_ratios = [new - old for new, old, _ in sequence]
        for new, old, advantage in sequence:
            log_ratio = new - old if level == "token" else sum(log_ratios) / len(log_ratios)
            ratio = math.exp(min(max(log_ratio, -20), 20))
            clipped = min(max(ratio, 1 - low), 1 + high)
            objective = min(ratio * advantage, clipped * advantage)
            if dual is not None and advantage < 0:
                objective = max(objective, dual * advantage)
            losses.append(-objective)
    return losses


LOGPROB = st.floats(-4, 0, width=32) | st.floats(-300, 0, width=32)
TOKEN = st.tuples(LOGPROB, LOGPROB, st.floats(-2, 2, width=32))


@settings(max_examples=1000)
@given(
    sequences=st.lists(st.lists(TOKEN, max_size=5), min_size=1, max_size=4),
    dual=st.sampled_from([None, 3.0]),
    level=st.sampled_from(["token", "sequence"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_agrees_with_a_loop(
    sequences: list[list[tuple[float, float, float]]],
    dual: float | None,
    level: RatioLevel,
    dtype: torch.dtype,
) -> None:
    """Gaps of hundreds between the policies among them."""
    tokens = [token for sequence in sequences for token in sequence]
    new, old, advantages = (
        torch.tensor([token[i] for token in tokens], dtype=dtype) for i in range(3)
    )
    new.requires_grad_()
    found = clipped_policy_loss(
        new,
        old,
        advantages,
        torch.tensor([len(sequence) for sequence in sequences]),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual,
        ratio_level=level,
    )
    expected = loop_loss(sequences, 0.2, 0.28, dual, level)
    within = 1e-6 if dtype is torch.float64 else 1e-5
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.loss_T.detach().double(), wanted, rtol=within, atol=within)
    if tokens:
        (gradient,) = torch.autograd.grad(found.loss_T.sum(), new)
        assert torch.isfinite(gradient).all()


def loss_of(log_ratio: list[float], advantage: list[float], **options: Any) -> tuple[Any, Tensor]:
    new = torch.tensor(log_ratio, requires_grad=True)
    result = clipped_policy_loss(
        new,
        torch.zeros(len(log_ratio)),
        torch.tensor(advantage),
        torch.tensor([len(log_ratio)]),
        clip_low=0.2,
        clip_high=0.28,
        **options,
    )
    result.loss_T.sum().backward()
    assert new.grad is not None
    return result, new.grad


def test_gradient_flows_only_where_the_clipped_branch_was_not_taken() -> None:
    up, down = math.log(1.5), math.log(0.5)
    result, gradient = loss_of([up, up, down, down, 0.0], [1.0, -1.0, 1.0, -1.0, 1.0])
    assert result.clipped_T.tolist() == [True, False, False, True, False]
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.5, -0.5, 0.0, -1.0]))


def test_bounds_are_separate() -> None:
    result, _ = loss_of([math.log(1.25), math.log(0.75)], [1.0, -1.0])
    assert result.clipped_T.tolist() == [False, True]


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    result, gradient = loss_of([3.0], [-2.0], dual_clip=3.0)
    assert result.loss_T.tolist() == [6.0]
    assert bool(result.clipped_T)
    assert float(gradient) == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratio_overflow_leaks_no_nan_gradient(level: RatioLevel, advantage: float) -> None:
    result, gradient = loss_of([200.0, 0.0], [advantage] * 2, ratio_level=level)
    assert torch.isfinite(result.loss_T).all()
    assert torch.isfinite(gradient).all()


def test_sequence_ratio_is_the_geometric_mean_of_the_tokens() -> None:
    result, _ = loss_of([0.1, 0.3, -0.1], [1.0] * 3, ratio_level="sequence")
    torch.testing.assert_close(result.ratio_T, torch.full((3,), math.exp(0.1)))


def test_a_sequence_ratio_is_exact_beside_the_clip_range_of_gspo() -> None:
    """Whatever single tokens have: of 3e-4 the mean in float32 would be off by more."""
    new_T = torch.tensor([-1e4, -0.5, -1.0], requires_grad=True)
    old_T = torch.tensor([-1.0, -0.5006, -1e4])
    found = clipped_policy_loss(
        new_T, old_T, torch.ones(3), torch.tensor([3]), clip_high=4e-4, ratio_level="sequence"
    )
    assert found.ratio_T.tolist() == pytest.approx([math.exp(2e-4)] * 3, abs=1e-6)
    assert not found.clipped_T.any()


def test_half_precision_is_computed_in_float32() -> None:
    values = torch.tensor([-1.0], dtype=torch.bfloat16)
    result = clipped_policy_loss(values, values, values, torch.tensor([1]))
    assert result.loss_T.dtype == torch.float32


def drawn(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_recomputed_logprobs_keep_the_behaviour_policy_s_weight() -> None:
    """Decoupled PPO, token by token: the weight old / behaviour once was left out."""
    logprobs, old, behaviour, advantages = drawn(4)
    lengths = torch.tensor([3, 4])
    weights = gap_weights(old, behaviour, lengths, cap=1.5)
    found = clipped_policy_loss(logprobs, old, advantages, lengths, weights_T=weights).loss_T
    for t in range(7):
        ratio = math.exp(logprobs[t] - old[t])
        weight = min(math.exp(old[t] - behaviour[t]), 1.5)
        clipped = min(max(ratio, 0.8), 1.2)
        expected = -weight * min(ratio * advantages[t], clipped * advantages[t])
        assert float(found[t]) == pytest.approx(float(expected))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rule", ["truncate", "mask"])
def test_weights_against_a_loop(level: RatioLevel, rule: GapRule) -> None:
    old, behaviour = drawn(2)
    found = gap_weights(
        old, behaviour, torch.tensor([3, 0, 4]), level=level, rule=rule, cap=1.8
    ).tolist()
    for start, end in ((0, 3), (3, 7)):
        gaps = (old - behaviour)[start:end].tolist()
        for t, gap in enumerate(gaps, start):
            weight = math.exp(sum(gaps) if level == "sequence" else gap)
            if rule == "mask" and not 1 / 1.8 <= weight <= 1.8:
                weight = 0.0
            assert found[t] == pytest.approx(min(weight, 1.8))


@settings(max_examples=1000)
@given(
    sequences=st.lists(st.lists(st.tuples(LOGPROB, LOGPROB), max_size=5), min_size=1, max_size=4),
    level=st.sampled_from(["token", "sequence"]),
    rule=st.sampled_from(["truncate", "mask"]),
    cap=st.floats(1.1, 8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_random_weights_against_a_loop(
    sequences: list[list[tuple[float, float]]],
    level: RatioLevel,
    rule: GapRule,
    cap: float,
    dtype: torch.dtype,
) -> None:
    """Gaps of hundreds between the policies among them."""
    expected = []
    for sequence in sequences:
        gaps = [old - behaviour for old, behaviour in sequence]
        for gap in gaps:
            exponent = sum(gaps) if level == "sequence" else gap
            weight = math.exp(min(max(exponent, -20), 20))
            if rule == "mask":
                assume(abs(abs(exponent) - math.log(cap)) > 1e-3)
                weight = weight if abs(exponent) < math.log(cap) else 0.0
            expected.append(min(weight, cap))
    pairs = [pair for sequence in sequences for pair in sequence]
    old, behaviour = (torch.tensor([pair[i] for pair in pairs], dtype=dtype) for i in range(2))
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    found = gap_weights(old, behaviour, lengths, level=level, rule=rule, cap=cap)
    within = 1e-9 if dtype is torch.float64 else 1e-3
    assert found.tolist() == pytest.approx(expected, rel=within, abs=within)


def test_a_sequence_ratio_keeps_the_credit_of_each_token() -> None:
    """GSPO-token: with one gradient for all tokens, a critic's advantages would be averaged."""
    _, gradient = loss_of([0.0, 0.0, 0.0], [1.0, -2.0, 0.0], ratio_level="sequence")
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 2.0, 0.0]))


def test_cispo_keeps_the_gradient_of_tokens_beyond_the_bound() -> None:
    up = math.log(3.0)
    result, gradient = loss_of([up, 0.0], [1.0, -1.0], surrogate="cispo")
    assert result.clipped_T.tolist() == [True, False]
    torch.testing.assert_close(gradient, torch.tensor([-1.28, 1.0]))
