"""GRPO as a whole: that it composes what it says, and may be cut in pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algorithms.aggregation import Aggregation, denominator
from m2flow.algorithms.grpo import GRPOLoss
from m2flow.algorithms.kl import KLEstimator
from m2flow.errors import UserError


@dataclass(frozen=True)
class TokenColumns:
    """What `GRPOLoss.loss` is given."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    lengths_B: Tensor
    reference_logprobs_T: Tensor
    entropy_T: Tensor


def columns(seed: int, lengths: list[int]) -> TokenColumns:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    new, old, reference = -3 * torch.rand(3, num_tokens, generator=generator, dtype=torch.float64)
    entropy = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return TokenColumns(
        logprobs_T=new.requires_grad_(),
        old_logprobs_T=old,
        advantages_T=advantages.repeat_interleave(torch.tensor(lengths)),
        lengths_B=torch.tensor(lengths),
        reference_logprobs_T=reference,
        entropy_T=entropy.requires_grad_(),
    )


def loop_loss(grpo: GRPOLoss, given: TokenColumns) -> float:
    """Token-mean GRPO with k3 and an entropy bonus, token by token."""
    total, counted = 0.0, 0
    for new, old, advantage, reference, entropy in zip(
        given.logprobs_T.tolist(),
        given.old_logprobs_T.tolist(),
        given.advantages_T.tolist(),
        given.reference_logprobs_T.tolist(),
        given.entropy_T.tolist(),
        strict=True,
    ):
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - grpo.clip_low), 1 + grpo.clip_high)
        kl = math.exp(reference - new) - 1 - (reference - new)
        total -= min(ratio * advantage, clipped * advantage)
        total += grpo.kl_coefficient * kl - grpo.entropy_coefficient * entropy
        counted += 1
    return total / counted


FULL = GRPOLoss(aggregation="token-mean", kl_coefficient=0.1, entropy_coefficient=0.01)


def test_agrees_with_a_loop() -> None:
    given = columns(0, [3, 5, 1, 4])
    divisor = denominator(given.lengths_B, "token-mean")
    loss = FULL.loss(**vars(given)).loss / divisor
    assert float(loss.detach()) == pytest.approx(loop_loss(FULL, given))


Token = tuple[float, float, float, float, float, float]
"""Log-probabilities: new, old, of the policy that drew, of the reference; advantage; entropy."""

BUDGET, MOST = 6, 20.0
"""What an answer counts in the sum of Dr.GRPO; log-ratios are cut at the other."""


def plain_loss(
    grpo: GRPOLoss, sequences: list[list[Token]], *, weighed: bool
) -> tuple[float, list[float], list[float], float]:
    """The loss; its derivatives by each log-probability and entropy; the size of the largest."""
    loss, slopes, of_entropy, size = 0.0, [], [], 1.0
    counted = [sequence for sequence in sequences if sequence]
    shares = {
        "token-mean": lambda _: 1 / sum(map(len, counted)),
        "sequence-mean-token-mean": lambda length: 1 / (len(counted) * length),
        "sequence-mean-token-sum": lambda _: 1 / (len(counted) * BUDGET),
    }
    for sequence in counted:
        share = shares[grpo.aggregation](len(sequence))
        for new, old, drew, reference, advantage, entropy in sequence:
            ratio = math.exp(min(max(new - old, -MOST), MOST))
            bounded = min(max(ratio, 0.8), 1.2)
            away, apart = abs(new - old), reference - new
            edges = (ratio - 0.8, ratio - 1.2, away - MOST, apart - MOST)
            hypothesis.assume(all(abs(edge) > 1e-6 for edge in edges))
            weight = min(math.exp(min(max(old - drew, -MOST), MOST)), 5.0) if weighed else 1.0
            free = ratio * advantage <= bounded * advantage and away < MOST
            slope = -weight * ratio * advantage if free else 0.0
            term = -weight * min(ratio * advantage, bounded * advantage)
            if grpo.kl_estimator == "k2":
                kl, kl_slope = apart**2 / 2, -apart
            else:
                kl = math.expm1(min(apart, MOST)) - min(apart, MOST)
                kl_slope = 1 - math.exp(apart) if apart < MOST else 0.0
            term += grpo.kl_coefficient * kl - grpo.entropy_coefficient * entropy
            slope += grpo.kl_coefficient * kl_slope
            loss += share * term
            slopes.append(share * slope)
            of_entropy.append(-share * grpo.entropy_coefficient)
            size = max(size, abs(term), abs(slope))
    return loss, slopes, of_entropy, size


LOGPROB = st.floats(-4, 0) | st.floats(-60, 0)
TOKEN = st.tuples(LOGPROB, LOGPROB, LOGPROB, LOGPROB, st.floats(-2, 2), st.floats(0, 3))


@hypothesis.settings(max_examples=1000)
@hypothesis.given(
    sequences=st.lists(st.lists(TOKEN, max_size=4), min_size=1, max_size=4).filter(any),
    aggregation=st.sampled_from(
        ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"]
    ),
    estimator=st.sampled_from(["k2", "k3"]),
    coefficients=st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 0.01])),
    weighed=st.booleans(),
)
def test_kl_entropy_and_weights_against_a_loop(
    sequences: list[list[Token]],
    aggregation: Aggregation,
    estimator: KLEstimator,
    coefficients: tuple[float, float],
    weighed: bool,
) -> None:
    grpo = GRPOLoss(
        aggregation=aggregation,
        token_budget=BUDGET,
        kl_estimator=estimator,
        kl_coefficient=coefficients[0],
        entropy_coefficient=coefficients[1],
    )
    expected, slopes, of_entropy, size = plain_loss(grpo, sequences, weighed=weighed)
    tokens = [token for sequence in sequences for token in sequence]
    new, old, drew, reference, advantages, entropy = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    loss = grpo.loss(
        new.requires_grad_(),
        old,
        advantages,
        lengths,
        behaviour_logprobs_T=drew if weighed else None,
        reference_logprobs_T=reference,
        entropy_T=entropy.requires_grad_(),
    ).loss / grpo.denominator(lengths)
    gradient = torch.autograd.grad(loss, (new, entropy), materialize_grads=True)
    within = 1e-9 * size
    assert float(loss.detach()) == pytest.approx(expected, abs=within)
    assert gradient[0].tolist() == pytest.approx(slopes, abs=within)
    assert gradient[1].tolist() == pytest.approx(of_entropy, abs=within)


@pytest.mark.parametrize(
    "grpo",
    [
        FULL,
        replace(FULL, aggregation="sequence-mean-token-mean", ratio_level="sequence"),
        replace(FULL, aggregation="sequence-mean-token-sum", dual_clip=3.0),
    ],
)
def test_pieces_give_the_gradient_of_the_whole(grpo: GRPOLoss) -> None:
    whole = columns(1, [3, 5, 1, 4])
    (expected,) = torch.autograd.grad(grpo.loss(**vars(whole)).loss, whole.logprobs_T)

    gradient = torch.zeros_like(expected)
    for rows, tokens in ((slice(0, 1), slice(0, 3)), (slice(1, 4), slice(3, 13))):
        piece = TokenColumns(
            whole.logprobs_T[tokens],
            whole.old_logprobs_T[tokens],
            whole.advantages_T[tokens],
            whole.lengths_B[rows],
            whole.reference_logprobs_T[tokens],
            whole.entropy_T[tokens],
        )
        gradient += torch.autograd.grad(grpo.loss(**vars(piece)).loss, whole.logprobs_T)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_reports_the_figures_it_names() -> None:
    for grpo in (GRPOLoss(), FULL):
        assert set(grpo.loss(**vars(columns(3, [2, 2]))).sums) == set(grpo.figures)


def test_sequences_without_advantage_idle_only_without_kl_and_entropy() -> None:
    assert GRPOLoss().zero_advantage_is_idle
    assert not GRPOLoss(kl_coefficient=0.1).zero_advantage_is_idle
    assert not GRPOLoss(entropy_coefficient=0.1).zero_advantage_is_idle


def test_k1_in_the_loss_is_refused() -> None:
    with pytest.raises(UserError, match="expected gradient of k1 is 0"):
        GRPOLoss(kl_coefficient=0.1, kl_estimator="k1")
    GRPOLoss(kl_estimator="k1")
