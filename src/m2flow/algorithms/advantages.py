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


def group_advantages(rewards_B: Tensor, group_size: int, normalize_std: bool = True) -> Tensor:
    """Group-relative advantages: `(r - mean) / (std + 1e-6)` within each group of consecutive rows.

    The standard deviation is the population one (divided by G). With `normalize_std=False` only
    the mean is taken off, as Dr.GRPO does (arXiv 2503.20783). A group whose rewards are all equal
    gets exactly zero, so that rounding of the mean is never blown up by a vanishing deviation.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.

    Args:
        rewards_B: [B], any real dtype.
        group_size: G, rows of one group.
        normalize_std: whether to divide by the deviation.

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
    rewards_NG = rewards_B.to(torch.float64).view(-1, group_size)
    centred_NG = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
    if normalize_std:
        centred_NG = centred_NG / (rewards_NG.std(dim=1, correction=0, keepdim=True) + 1e-6)
    equal_N1 = (rewards_NG == rewards_NG[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal_N1, 0.0, centred_NG).to(dtype).view(-1)


def leave_one_out_advantages(rewards_B: Tensor, group_size: int) -> Tensor:
    """`r - mean of the other rewards of its group`, which is `G / (G - 1) * (r - mean)`.

    Source: RLOO (arXiv 2402.14740), equation 8.

    Args, result and errors: as for `group_advantages`.
    """
    return group_advantages(rewards_B, group_size, False) * (group_size / (group_size - 1))


def equal_groups(rewards_B: Tensor, group_size: int) -> Tensor:
    """[B] bool: rows of groups whose rewards are all the same, of which nothing can be learned."""
    rewards_NG = rewards_B.view(-1, group_size)
    return (rewards_NG == rewards_NG[:, :1]).all(dim=1).repeat_interleave(group_size)
