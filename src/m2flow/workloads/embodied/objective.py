"""What PPO and GRPO ask of a policy: a loss, and its gradient by what the policy says, written out.

Autograd's graph begins at the policy and not at the loss: `Policy.judge` takes the gradients on.
Of a few hundred figures on the CPU the same is said by NumPy, whose calls take a fraction of
torch's: the loss of a policy of two small layers takes as long as its networks else.

Legend: T turns, K steps of a turn, D coordinates drawn for a step, N what the loss counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m2flow.algorithms.kl import MAX_LOG_RATIO
from m2flow.algorithms.policy_loss import clipped_policy_gradient, clipped_policy_loss
from m2flow.algorithms.value_loss import clipped_value_loss
from m2flow.models.policies.protocol import Evaluation, at_level
from m2flow.workloads.embodied.config import EmbodiedAlgorithmSection
from m2flow.workloads.embodied.turns import Examples

SUMS = (
    "loss", "policy", "entropy", "clipped", "ratio", "kl", "value", "denominator", "counted",
    "turns",
)  # fmt: skip
"""What is added up over the pieces of a mini-batch; gradients are divided by the denominator, the
weight of what the loss counts: each of the same, or each of an episode a share of its own."""


FEW = 4096
"""Figures of which NumPy says the loss."""


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a policy for some turns.

    Attributes:
        logprobs_TKD, entropy_TKD, values_T: gradients of the loss's sum by what the policy said;
            None where there is none.
        sums: float64, those of `SUMS`.
    """

    logprobs_TKD: Tensor
    entropy_TKD: Tensor | None
    values_T: Tensor | None
    sums: Tensor


@torch.no_grad()
def wanted(
    judged: Evaluation,
    some: Examples,
    algorithm: EmbodiedAlgorithmSection,
    scale: float,
    counted: float,
) -> Wanted:
    """The loss of some turns, and its gradient.

    Args:
        judged: what the policy says of them.
        some: the turns.
        algorithm: which loss.
        scale: what values are divided by.
        counted: how many things the loss counts in a turn, in the mean over the step's turns.
    """
    plain = some.weight_T is None and some.taken_TK is None
    few = judged.logprobs.numel() <= FEW and judged.logprobs.device.type == "cpu"
    if plain and few and judged.logprobs.dtype == some.old.dtype == torch.float32:
        return wanted_of_few(judged, some, algorithm, scale, counted)
    logprobs_N, entropy_N = (
        some.counted(at_level(some.carried_out(part), algorithm.level))
        for part in (judged.logprobs, judged.entropy)
    )
    advantage_N = some.spread(some.advantage)
    weight_N = None if some.weight_T is None else some.spread(some.weight_T)
    policy = clipped_policy_loss(
        logprobs_N,
        some.counted(some.old),
        advantage_N,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )
    slope_N = clipped_policy_gradient(policy, advantage_N)
    ratio_N = policy.ratio_T
    figures = torch.stack(
        [policy.loss_T, entropy_N, policy.clipped_T, ratio_N, ratio_N - 1 - policy.log_ratio_T]
    ).sum(1, dtype=torch.float64)
    loss, dear = figures[:1], algorithm.entropy_coefficient
    count = weight = float(logprobs_N.numel())
    if weight_N is not None:
        slope_N, weight = slope_N * weight_N, float(weight_N.sum(dtype=torch.float64))
        loss = (weight_N * (policy.loss_T - dear * entropy_N)).sum(0, True, dtype=torch.float64)
    elif dear:
        loss = loss - dear * figures[1:2]
    sure_TKD = None
    if dear:
        flat_N = torch.full_like(slope_N, -dear) if weight_N is None else weight_N * -dear
        sure_TKD = some.back(flat_N, judged.entropy.shape)
    values_T, missed = None, figures.new_zeros(1)
    if judged.values is not None and some.returns_T is not None:
        assert some.values_T is not None
        share_T = judged.values / scale
        value = clipped_value_loss(
            share_T, some.values_T, some.returns_T, clip=algorithm.value_clip
        )
        missed = value.loss_T.sum(0, True, dtype=torch.float64)
        # The mean over turns, beside means over what the level counts.
        coefficient = algorithm.value_coefficient * counted
        loss = loss + coefficient * missed
        away_T = (share_T - some.returns_T).masked_fill_(value.clipped_T, 0.0)
        values_T = away_T.mul_(coefficient / scale)
    counts = figures.new_tensor([weight, count, len(some)])
    sums = torch.cat([loss, figures, missed, counts])
    return Wanted(some.back(slope_N, judged.logprobs.shape), sure_TKD, values_T, sums)


@torch.no_grad()
def wanted_of_few(
    judged: Evaluation,
    some: Examples,
    algorithm: EmbodiedAlgorithmSection,
    scale: float,
    counted: float,
) -> Wanted:
    """What `wanted` says, by NumPy: of float32, all steps carried out, all of the same weight."""
    shape, turns, count = judged.logprobs.shape, len(some), some.old.numel()
    old_N, advantage = some.old.numpy().ravel(), some.advantage.numpy().ravel()
    times = count // len(advantage)
    cost_N = -(advantage if times == 1 else advantage.repeat(times))
    with np.errstate(all="ignore"):  # what is not finite is found in the gradients' norm
        log_ratio_N = _at(judged.logprobs, count) - old_N
        ratio_N = np.exp(np.minimum(np.maximum(log_ratio_N, -MAX_LOG_RATIO), MAX_LOG_RATIO))
        low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
        free_N = ratio_N * cost_N
        kept_N = np.minimum(np.maximum(ratio_N, low), high) * cost_N
        clipped_N = kept_N > free_N
        slope_N = free_N.copy()
        slope_N[clipped_N | (np.abs(log_ratio_N) > MAX_LOG_RATIO)] = 0.0
        entropy_N = _at(judged.entropy, count)
        each = (np.where(clipped_N, kept_N, free_N), entropy_N, clipped_N, ratio_N,
                ratio_N - 1 - log_ratio_N)  # fmt: skip
        figures = np.array(each, np.float64).sum(1).tolist()
        loss, missed, sure_TKD, values_T = figures[0], 0.0, None, None
        if dear := algorithm.entropy_coefficient:
            loss -= dear * figures[1]
            sure_TKD = torch.full_like(judged.entropy, -dear)
        if judged.values is not None and some.returns_T is not None:
            assert some.values_T is not None
            share_T, returns_T = judged.values.numpy() / scale, some.returns_T.numpy()
            away_T = share_T - returns_T
            square_T = away_T * away_T
            if (clip := algorithm.value_clip) is not None:
                before_T = some.values_T.numpy()
                moved_T = share_T - before_T
                kept_T = before_T + np.minimum(np.maximum(moved_T, -clip), clip)
                bounded_T = (np.where(np.abs(moved_T) <= clip, share_T, kept_T) - returns_T) ** 2
                away_T[bounded_T > square_T] = 0.0
                square_T = np.maximum(square_T, bounded_T)
            missed = float(square_T.sum(dtype=np.float64)) / 2
            coefficient = algorithm.value_coefficient * counted
            loss += coefficient * missed
            values_T = torch.from_numpy(away_T * np.float32(coefficient / scale))
    slope_TKD = some.back(torch.from_numpy(slope_N), shape)
    sums = torch.from_numpy(np.array([loss, *figures, missed, count, count, turns], np.float64))
    return Wanted(slope_TKD, sure_TKD, values_T, sums)


def _at(values_TKD: Tensor, count: int) -> Any:
    """Figures of tokens summed to so many of their actions or turns, an array [N]."""
    values = values_TKD.numpy()
    if values.size == count:
        return values.ravel()
    turns, steps, _ = values.shape
    return values.sum(2).ravel() if count == turns * steps else values.sum((1, 2))
