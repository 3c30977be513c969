"""Generalised advantage estimation over the tokens of packed answers, one pass for all of them.

The tokens of a sequence are its actions; the value of a token is that of the state before it, the
reward of a token comes with it, and after the last token the episode is over (value 0).

Shapes: T completion tokens of B sequences lying one after another, `lengths_B` long; L the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m2flow.algorithms.finite import check_finite


@dataclass(frozen=True)
class Estimates:
    """[T] advantages, and returns: what a critic should have said."""

    advantages_T: Tensor
    returns_T: Tensor


def generalised_advantages(
    rewards_T: Tensor,
    values_T: Tensor,
    lengths_B: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Estimates:
    """`A_t = sum over k of (gamma lam)^k d_(t+k)`, where `d_t = r_t + gamma V_(t+1) - V_t`.

    Returns are `A_t + V_t`, the lambda-returns. Each sequence is computed by itself, element by
    element, so that its figures do not depend on which others it is packed with.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equation 16.

    Args:
        rewards_T: [T].
        values_T: [T], constant.
        lengths_B: [B] int64, sequence lengths in tokens; they sum to T. A sequence may be empty.
        gamma: discount from one token to the next, in [0, 1].
        lam: between 0 (trust the critic: one step) and 1 (trust the rewards: all of them).

    Returns:
        Figures at least float32, float64 where rewards or values are.

    Raises:
        UserError: a reward or value is not finite.
    """
    assert 0 <= gamma <= 1 and 0 <= lam <= 1
    assert rewards_T.shape == values_T.shape == (int(lengths_B.sum()),)
    dtype = torch.promote_types(rewards_T.dtype, values_T.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    rewards_T, values_T = rewards_T.detach().to(dtype), values_T.detach().to(dtype)
    check_finite({"reward": rewards_T, "value": values_T})
    advantages_T = _backwards(rewards_T, values_T, lengths_B, gamma, lam)
    return Estimates(advantages_T, advantages_T + values_T)


def _backwards(
    rewards_T: Tensor, values_T: Tensor, lengths_B: Tensor, gamma: float, lam: float
) -> Tensor:
    """The recursion from the last token to the first, all sequences abreast."""
    num_sequences, longest = lengths_B.numel(), int(lengths_B.max()) if lengths_B.numel() else 0
    real_BL = torch.arange(longest, device=lengths_B.device) < lengths_B[:, None]
    blank_BL = rewards_T.new_zeros(num_sequences, longest)
    rewards_BL = blank_BL.masked_scatter(real_BL, rewards_T)
    values_BL = blank_BL.masked_scatter(real_BL, values_T)
    advantages_BL = torch.zeros_like(blank_BL)
    next_value_B = next_advantage_B = rewards_T.new_zeros(num_sequences)
    for t in reversed(range(longest)):
        surprise_B = rewards_BL[:, t] + gamma * next_value_B - values_BL[:, t]
        # Past a sequence's end all of it is zero, and so is what its last token looks on to.
        next_advantage_B = surprise_B + gamma * lam * next_advantage_B
        next_value_B = values_BL[:, t]
        advantages_BL[:, t] = next_advantage_B
    return advantages_BL[real_BL]


def rewards_at_end(rewards_B: Tensor, lengths_B: Tensor) -> Tensor:
    """[T] token rewards: that of a sequence at its last token, 0 elsewhere.

    An empty sequence has no token, and its reward is lost.
    """
    rewards_T = rewards_B.new_zeros(int(lengths_B.sum()))
    filled_B = lengths_B > 0
    rewards_T[lengths_B.cumsum(0)[filled_B] - 1] = rewards_B[filled_B]
    return rewards_T


def whitened(values_T: Tensor) -> Tensor:
    """`(x - mean) / (std + 1e-8)` over all tokens given.

    Mean and (population) deviation are taken in float64. Values that are all the same become
    exactly zero, so that rounding of the mean is never blown up by a vanishing deviation.
    """
    wide_T = values_T.to(torch.float64)
    if not wide_T.numel() or bool((wide_T == wide_T[0]).all()):
        return torch.zeros_like(values_T)
    return ((wide_T - wide_T.mean()) / (wide_T.std(correction=0) + 1e-8)).to(values_T.dtype)
