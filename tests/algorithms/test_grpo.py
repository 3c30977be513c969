"""GRPO as a whole: that it composes what it says, and may be cut in pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from m2flow.algorithms.aggregation import denominator
from m2flow.algorithms.grpo import GRPOLoss
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
