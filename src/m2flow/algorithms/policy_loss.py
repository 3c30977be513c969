"""The surrogates of policy gradients, at token or at sequence level, one loss per token.

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
Surrogate = Literal["clip", "cispo"]
GapRule = Literal["truncate", "mask"]


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss [T] with what became of the ratio.

    `ratio_T` (detached) is what the advantage was multiplied by, `log_ratio_T` (detached) the
    log-ratio of the token itself whatever the level, `clipped_T` (bool) the tokens for which the
    bound counts: of "clip" those that no gradient flows through. The weight for the gap to the
    behaviour policy is part of `loss_T` alone.
    """

    loss_T: Tensor
    ratio_T: Tensor
    log_ratio_T: Tensor
    clipped_T: Tensor


def clipped_policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    lengths_B: Tensor | None = None,
    *,
    weights_T: Tensor | None = None,
    surrogate: Surrogate = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: RatioLevel = "token",
) -> PolicyLoss:
    """The surrogate loss of every token, whose gradient is the policy's.

    "clip": `-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; PPO (arXiv 1707.06347),
    equation 7, with the separate bounds of DAPO (arXiv 2503.14476), equation 8, and dual clip
    (arXiv 1912.09729), equation 5: for A < 0 the loss is at most `-dual_clip * A`.
    "cispo": `-w stopped(clip(r, 1 - clip_low, 1 + clip_high)) A log p`; MiniMax-M1
    (arXiv 2506.13585), equation 4: every token keeps its gradient, and its weight is bounded.

    At sequence level every token of a sequence has the value of
    `s = exp(mean over its tokens of the log-ratio)`, and the gradient of its own log-probability:
    GSPO-token (arXiv 2507.18071), equation 13, which is GSPO where a sequence's advantages are the
    same, and keeps the credit of single tokens where they are not.

    Args:
        logprobs_T: [T] under the policy that learns; gradients flow through them.
        old_logprobs_T: [T] under the policy that the ratio is taken against.
        advantages_T: [T], constant.
        lengths_B: [B] int64, the sequences' lengths in tokens; they sum to T. Read at sequence
            level alone.
        weights_T: [T], constant: `w`, see `gap_weights`; None for 1.
        surrogate: which of the two.
        clip_low, clip_high: how far below and above 1 the ratio may move.
        dual_clip: of "clip", a bound above 1 for negative advantages, or None.
        ratio_level: one ratio a token, or one a sequence.

    Returns:
        Figures at least float32, float64 where the log-probabilities are.
    """
    assert 0 <= clip_low <= 1 and clip_high >= 0 and (dual_clip is None or dual_clip > 1)
    dtype = torch.promote_types(logprobs_T.dtype, torch.float32)
    log_ratio_T = logprobs_T.to(dtype) - old_logprobs_T.to(dtype)
    advantages_T = advantages_T.to(dtype)
    exponent_T = log_ratio_T
    if ratio_level == "sequence":
        assert lengths_B is not None
        # Clip ranges are some 1e-4, and a mean of many terms in float32 may be off by as much.
        exact_T = logprobs_T.detach().double() - old_logprobs_T.double()
        own_T = log_ratio_T - log_ratio_T.detach()
        exponent_T = _sequence_mean(exact_T, lengths_B).to(dtype) + own_T
    ratio_T = exponent_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded_T = ratio_T.detach().clamp(1 - clip_low, 1 + clip_high)
    if surrogate == "cispo":
        loss_T = -bounded_T * advantages_T * logprobs_T.to(dtype)
        clipped_T = bounded_T != ratio_T
    else:
        cost_T = -advantages_T
        free_T, kept_T = ratio_T * cost_T, bounded_T * cost_T
        clipped_T = kept_T > free_T
        loss_T = torch.where(clipped_T, kept_T, free_T)  # the larger; no gradient of `kept_T`
        if dual_clip is not None:
            ceiling_T = -dual_clip * advantages_T
            capped_T = (advantages_T < 0) & (loss_T > ceiling_T)
            loss_T = torch.where(capped_T, ceiling_T, loss_T)
            clipped_T = clipped_T | capped_T
    if weights_T is not None:
        loss_T = loss_T * weights_T.to(dtype)
    return PolicyLoss(loss_T, ratio_T.detach(), log_ratio_T.detach(), clipped_T)


def clipped_policy_gradient(loss: PolicyLoss, advantages_T: Tensor) -> Tensor:
    """The derivative of each token's loss by its own log-probability, for "clip" and no weights.

    Args:
        loss: what `clipped_policy_loss` gave, at token level without a dual clip.
        advantages_T: [T], those that it was given.
    """
    still_T = loss.clipped_T | (loss.log_ratio_T.abs() > MAX_LOG_RATIO)
    return (loss.ratio_T * -advantages_T.to(loss.ratio_T.dtype)).masked_fill_(still_T, 0.0)


def gap_weights(
    old_logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    lengths_B: Tensor,
    *,
    level: RatioLevel = "token",
    rule: GapRule = "truncate",
    cap: float = 5.0,
) -> Tensor:
    """`old / behaviour`, for tokens that another policy drew than the one the ratio is against.

    That is so for stale data (decoupled PPO, AReaL, arXiv 2505.24298, equation 5) and where the
    engine that draws computes otherwise than the trainer (truncated importance sampling).

    Args:
        old_logprobs_T: [T] under the policy that the ratio is taken against.
        behaviour_logprobs_T: [T] under the policy that drew the tokens.
        lengths_B: [B] int64, the sequences' lengths in tokens; they sum to T.
        level: of a token by itself, or the product over its whole sequence.
        rule: "truncate" bounds a weight by `cap`; "mask" makes it 0 above `cap` and below
            `1 / cap`.
        cap: at least 1.

    Returns:
        [T], constant, at least float32.
    """
    assert cap >= 1
    dtype = torch.promote_types(old_logprobs_T.dtype, torch.float32)
    gap_T = (old_logprobs_T.to(dtype) - behaviour_logprobs_T.to(dtype)).detach()
    if level == "sequence":
        numbers_T = _numbers(lengths_B)
        gap_T = gap_T.new_zeros(lengths_B.numel()).index_add(0, numbers_T, gap_T)[numbers_T]
    weights_T = gap_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if rule == "truncate":
        return weights_T.clamp(max=cap)
    return torch.where((weights_T > cap) | (weights_T < 1 / cap), 0.0, weights_T)


def _sequence_mean(values_T: Tensor, lengths_B: Tensor) -> Tensor:
    """The mean of each sequence's values, at each of its tokens."""
    numbers_T = _numbers(lengths_B)
    totals_B = values_T.new_zeros(lengths_B.numel()).index_add(0, numbers_T, values_T)
    return (totals_B / lengths_B.clamp(min=1))[numbers_T]


def _numbers(lengths_B: Tensor) -> Tensor:
    """int64 [T], which sequence each token is of."""
    numbers_B = torch.arange(lengths_B.numel(), device=lengths_B.device)
    return torch.repeat_interleave(numbers_B, lengths_B)
