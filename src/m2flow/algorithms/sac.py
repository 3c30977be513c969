"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905): targets and losses, row by row.

Two critics, of which the lower one counts, and a temperature that keeps the policy's entropy near a
target. Losses are not aggregated.

Legend: B rows of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def soft_targets(
    rewards_B: Tensor, discounts_B: Tensor, q_2B: Tensor, logprobs_B: Tensor, temperature: Tensor
) -> Tensor:
    """[B] what the critics should say: `r + g (min Q' - temperature log pi)`, equations 2 and 3.

    Args:
        rewards_B: of the transition.
        discounts_B: of what follows it; 0 where the episode terminated. One that was cut off goes
            on, as far as its value is concerned.
        q_2B: both target critics, of the next observation and of what the policy draws there.
        logprobs_B: of that action.
        temperature: what a nat of entropy is worth.
    """
    return rewards_B + discounts_B * (q_2B.min(dim=0).values - temperature * logprobs_B)


def critic_loss(q_2B: Tensor, targets_B: Tensor) -> Tensor:
    """[B] half the squared errors of both critics, equation 5."""
    return 0.5 * (q_2B - targets_B).square().sum(dim=0)


def actor_loss(q_2B: Tensor, logprobs_B: Tensor, temperature: Tensor) -> Tensor:
    """[B] for actions that the policy draws, with gradient through the draw: equation 7."""
    return temperature.detach() * logprobs_B - q_2B.min(dim=0).values


def temperature_loss(log_temperature: Tensor, logprobs_B: Tensor, target_entropy: float) -> Tensor:
    """[B]: the temperature rises where the entropy is below its target; equation 18.

    Of its logarithm, as usual implementations have it, so that it stays positive.
    """
    return -log_temperature * (logprobs_B.detach() + target_entropy)


@torch.no_grad()
def polyak(target: nn.Module, source: nn.Module, share: float) -> None:
    """Move the target's parameters by a share of the way to the source's."""
    for old, new in zip(target.parameters(), source.parameters(), strict=True):
        old.lerp_(new, share)
