"""The clipped surrogate of PPO, at token or at sequence level, one loss per token.

`loss_T` is not aggregated: weights and denominators are another file's idea (`aggregation`).
Log-ratios of any size leave finite losses and gradients behind.

Shapes: T completion tokens of B sequences lying one after another, `lengths_B` long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from m2flow.algorithms.kl import MAX_LOG_RATIO

RatioLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss [T] with what became of the ratio.

    `ratio_T` (detached) is what the advantage was multiplied by, `log_ratio_T` (detached) the
    log-ratio of the token itself whatever the level, `clipped_T` (bool) the tokens for which the
    clipped branch was taken, so that no gradient flows through them. The importance weight is part
    of `loss_T` alone.
    """

    loss_T: Tensor
    ratio_T: Tensor
    log_ratio_T: Tensor
    clipped_T: Tensor


def clipped_policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    lengths_B: Tensor,
    *,
    behaviour_logprobs_T: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: RatioLevel = "token",
    weight_cap: float = 5.0,
) -> PolicyLoss:
    """`-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` for every token.

    Sources: PPO (arXiv 1707.06347), equation 7; separate bounds from DAPO (arXiv 2503.14476),
    equation 8; dual clip (arXiv 1912.09729), equation 5: for A < 0 the loss is at most
    `-dual_clip * A`; sequence level from GSPO (arXiv 2507.18071), equation 7: every token of a
    sequence has the ratio `exp(mean over its tokens of the log-ratio)`; decoupled PPO from
    AReaL (arXiv 2505.24298), equation 5: `w = old / behaviour` corrects for tokens that another
    policy drew than the one that the ratio is taken against, here at most `weight_cap`.

    Args:
        logprobs_T: [T] under the policy that learns; gradients flow through them.
        old_logprobs_T: [T] under the policy that the ratio is taken against.
        advantages_T: [T], constant.
        lengths_B: [B] int64, the sequences' lengths in tokens; they sum to T.
        behaviour_logprobs_T: [T] under the policy that drew the tokens; None where that is the
            policy of `old_logprobs_T`, so that `w` is 1.
        clip_low, clip_high: how far below and above 1 the ratio may move.
        dual_clip: bound above 1 for negative advantages, or None.
        ratio_level: one ratio and weight a token, or one a sequence.
        weight_cap: the largest `w`.

    Returns:
        Figures at least float32, float64 where the log-probabilities are.
    """
    assert 0 <= clip_low <= 1 and clip_high >= 0 and (dual_clip is None or dual_clip > 1)
    dtype = torch.promote_types(logprobs_T.dtype, torch.float32)
    log_ratio_T = logprobs_T.to(dtype) - old_logprobs_T.to(dtype)
    advantages_T = advantages_T.to(dtype)
    if ratio_level == "sequence":
        exponent_T = _sequence_mean(log_ratio_T, lengths_B)
    else:
        exponent_T = log_ratio_T
    ratio_T = exponent_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_T = -ratio_T * advantages_T
    bounded_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    loss_T = torch.maximum(free_T, bounded_T)
    clipped_T = bounded_T > free_T
    if dual_clip is not None:
        ceiling_T = -dual_clip * advantages_T
        capped_T = (advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(capped_T, ceiling_T, loss_T)
        clipped_T = clipped_T | capped_T
    if behaviour_logprobs_T is not None:
        log_weight_T = (old_logprobs_T - behaviour_logprobs_T).to(dtype).detach()
        if ratio_level == "sequence":
            log_weight_T = _sequence_mean(log_weight_T, lengths_B)
        loss_T = loss_T * log_weight_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(
            max=weight_cap
        )
    return PolicyLoss(loss_T, ratio_T.detach(), log_ratio_T.detach(), clipped_T)


def _sequence_mean(values_T: Tensor, lengths_B: Tensor) -> Tensor:
    """The mean of each sequence's values, at each of its tokens."""
    numbers_B = torch.arange(lengths_B.numel(), device=lengths_B.device)
    sequence_T = torch.repeat_interleave(numbers_B, lengths_B)
    totals_B = values_T.new_zeros(lengths_B.numel()).index_add(0, sequence_T, values_T)
    return (totals_B / lengths_B.clamp(min=1)).index_select(0, sequence_T)
