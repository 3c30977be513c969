"""Advantages from rewards alone: how much better an answer did than the others to its prompt.

Pure functions of reward tensors. Rows of one group are consecutive. Nothing here knows where the
rewards came from or how the advantages are used.

Shapes: B rows (samples), N groups, G rows in a group; B = N * G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m2flow.algorithms.finite import check_finite
from m2flow.errors import UserError


def group_advantages(
    rewards_B: Tensor,
    group_size: int,
    normalize_std: bool = True,
    judged_B: Tensor | None = None,
) -> Tensor:
    """Group-relative advantages: `(r - mean) / (std + 1e-6)` within each group of consecutive rows.

    The standard deviation is the population one (divided by G). With `normalize_std=False` only
    the mean is taken off, as Dr.GRPO does (arXiv 2503.20783). A group whose rewards are all equal
    gets exactly zero, so that rounding of the mean is never blown up by a vanishing deviation.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.

    Args:
        rewards_B: [B], any real dtype.
        group_size: G, rows of one group.
        normalize_std: whether to divide by the deviation.
        judged_B: bool [B], rows that have a reward; others are compared with nobody, and get 0.
            None for all.

    Returns:
        [B], in the dtype of the rewards where that is a floating one, else float32.

    Raises:
        UserError: a group of one (it has no baseline), rows that do not fill whole groups, or a
            reward that is NaN or infinite.
    """
    assert rewards_B.ndim == 1, rewards_B.shape
    if group_size < 2:
        raise UserError(
            "a group-relative advantage needs several samples of one prompt to compare",
            key="samples_per_prompt",
            value=group_size,
            expected="at least 2",
            hint="raise samples_per_prompt, or choose an algorithm with another baseline",
        )
    if rewards_B.numel() % group_size:
        raise UserError(
            "the rewards do not fill whole groups",
            key="samples_per_prompt",
            value=group_size,
            expected=f"a divisor of the number of samples, {rewards_B.numel()}",
        )
    check_finite({"reward": rewards_B})
    dtype = rewards_B.dtype if rewards_B.is_floating_point() else torch.float32
    judged_B = torch.ones_like(rewards_B, dtype=torch.bool) if judged_B is None else judged_B
    judged_NG = judged_B.view(-1, group_size)
    count_N1 = judged_NG.sum(dim=1, keepdim=True).clamp(min=1)
    rewards_NG = torch.where(judged_NG, rewards_B.to(torch.float64).view(-1, group_size), 0.0)
    mean_N1 = rewards_NG.sum(dim=1, keepdim=True) / count_N1
    centred_NG = torch.where(judged_NG, rewards_NG - mean_N1, 0.0)
    if normalize_std:
        variance_N1 = centred_NG.square().sum(dim=1, keepdim=True) / count_N1
        centred_NG = centred_NG / (variance_N1.sqrt() + 1e-6)
    equal_B = equal_groups(rewards_B, group_size, judged_B)
    return torch.where(equal_B, 0.0, centred_NG.view(-1)).to(dtype)


def leave_one_out_advantages(
    rewards_B: Tensor, group_size: int, judged_B: Tensor | None = None
) -> Tensor:
    """`r - mean of the other rewards of its group`, which is `G / (G - 1) * (r - mean)`.

    Source: RLOO (arXiv 2402.14740), equation 8.

    Args, result and errors: as for `group_advantages`.
    """
    advantages_B = group_advantages(rewards_B, group_size, False, judged_B)
    judged_B = torch.ones_like(rewards_B, dtype=torch.bool) if judged_B is None else judged_B
    count_N = judged_B.view(-1, group_size).sum(dim=1)
    factor_N = count_N.to(torch.float64) / (count_N - 1).clamp(min=1)
    return advantages_B * factor_N.repeat_interleave(group_size).to(advantages_B.dtype)


def equal_groups(rewards_B: Tensor, group_size: int, judged_B: Tensor | None = None) -> Tensor:
    """[B] bool: rows of groups whose rewards are all the same, of which nothing can be learned."""
    rewards_NG = rewards_B.to(torch.float64).view(-1, group_size)
    judged_NG = torch.ones_like(rewards_NG, dtype=torch.bool)
    if judged_B is not None:
        judged_NG = judged_B.view(-1, group_size)
    highest_N = rewards_NG.masked_fill(~judged_NG, -torch.inf).amax(dim=1)
    lowest_N = rewards_NG.masked_fill(~judged_NG, torch.inf).amin(dim=1)
    return (highest_N <= lowest_N).repeat_interleave(group_size)
