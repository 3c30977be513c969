"""Generalised advantage estimation over segments of episodes: turns of several steps, cuts between.

A turn is a decision of the policy and the steps that it was carried out for. A segment is what one
environment did, turn by turn; episodes may end within it. Behind a turn that ends an episode by the
environment's own rules no return follows; behind one that was cut off the return is what the critic
expects of the observation there.

Shapes: T turns of B segments lying one after another, `lengths_B` long; L the longest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m2flow.algorithms.finite import check_finite
from m2flow.algorithms.gae import Estimates


def discounted_rewards(rewards_TK: Tensor, gamma: float) -> Tensor:
    """[T] the rewards of a turn's steps, each discounted by the steps before it in the turn."""
    discounts_K = gamma ** torch.arange(rewards_TK.shape[1], dtype=torch.float64)
    return (rewards_TK.to(torch.float64) * discounts_K).sum(1)


def action_advantages(advantages_T: Tensor, rewards_TK: Tensor, gamma: float) -> Tensor:
    """`A_(t,k) = A_t - (r_(t,0) + gamma r_(t,1) + ... + gamma^(k-1) r_(t,k-1))`.

    An action is credited with what follows it, and not with the rewards of the turn before it.
    Where actions of a turn are drawn independently given its observation, those rewards do not
    depend on it, and the expected policy gradient is that of `A_t`. What RLinf calls
    `reward_type: action_level` (RLinf-VLA, arXiv 2510.06710) has a value of each action too; here
    there is one of a turn, which is a baseline for all of its actions.

    Args:
        advantages_T: [T] of the turns, see `segment_advantages`.
        rewards_TK: [T, K] of their steps, 0 behind the end of an episode.
        gamma: discount from one step to the next.

    Returns:
        float64 [T, K].
    """
    discounts_K = gamma ** torch.arange(rewards_TK.shape[1], dtype=torch.float64)
    discounted_TK = rewards_TK.to(torch.float64) * discounts_K
    return advantages_T[:, None] - (discounted_TK.cumsum(1) - discounted_TK)


def segment_advantages(
    rewards_T: Tensor,
    values_T: Tensor,
    beyond_T: Tensor,
    ends_T: Tensor,
    steps_T: Tensor,
    lengths_B: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Estimates:
    """`A_t = d_t + g_t lam A_(t+1)` up to the end of the episode or of the segment.

    `d_t = r_t + g_t V_(t+1) - V_t` with `g_t = gamma^(steps of turn t)`. Where an episode or the
    segment ends with turn t, `V_(t+1)` is `beyond_t`, and nothing further counts. Returns are
    `A_t + V_t`. With turns of one step this is equation 16 of Schulman et al. 2016 (arXiv
    1506.02438), with the bootstrap at time limits of Pardo et al. 2018 (arXiv 1712.00378).

    Args:
        rewards_T: [T] of each turn, see `discounted_rewards`.
        values_T: [T] of the observations that the turns were decided on, constant.
        beyond_T: [T] the value behind the last observation: 0 where the episode terminated, the
            critic's where it was cut off. Looked at where a segment or an episode ends.
        ends_T: bool [T], an episode ends with the turn.
        steps_T: int64 [T], steps that the turn took.
        lengths_B: [B] int64, turns of the segments; they sum to T.
        gamma: discount from one step to the next, in [0, 1].
        lam: between 0 and 1, for each turn.

    Returns:
        float64 [T] advantages and returns.

    Raises:
        UserError: a reward or value is not finite.
    """
    assert 0 <= gamma <= 1 and 0 <= lam <= 1
    wide = [column.detach().to(torch.float64) for column in (rewards_T, values_T, beyond_T)]
    rewards_T, values_T, beyond_T = wide
    check_finite({"reward": rewards_T, "value": values_T, "value at a cut": beyond_T})
    discount_T = gamma ** steps_T.to(torch.float64)
    last_T = ends_T.clone()
    last_T[lengths_B[lengths_B > 0].cumsum(0) - 1] = True
    following_T = torch.cat([values_T[1:], values_T.new_zeros(1)])[: values_T.numel()]
    next_T = torch.where(last_T, beyond_T, following_T)
    surprise_T = rewards_T + discount_T * next_T - values_T
    carry_T = torch.where(last_T, 0.0, discount_T * lam)
    advantages_T = _backwards(surprise_T, carry_T, lengths_B)
    return Estimates(advantages_T, advantages_T + values_T)


def _backwards(surprise_T: Tensor, carry_T: Tensor, lengths_B: Tensor) -> Tensor:
    """`A_t = surprise_t + carry_t A_(t+1)`, all segments abreast."""
    longest = int(lengths_B.max()) if lengths_B.numel() else 0
    real_BL = torch.arange(longest) < lengths_B[:, None]
    blank_BL = surprise_T.new_zeros(lengths_B.numel(), longest)
    surprise_BL = blank_BL.masked_scatter(real_BL, surprise_T)
    carry_BL = blank_BL.masked_scatter(real_BL, carry_T)
    advantages_BL, after_B = torch.zeros_like(blank_BL), blank_BL.new_zeros(lengths_B.numel())
    for turn in reversed(range(longest)):
        after_B = surprise_BL[:, turn] + carry_BL[:, turn] * after_B
        advantages_BL[:, turn] = after_B
    return advantages_BL[real_BL]
