"""What a critic is trained on: the squared distance to the returns, bounded around the old value.

One loss per token; weights and denominators are another file's idea (`aggregation`).

Shapes: T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """Per-token loss [T], and the tokens (bool [T]) of which the bounded term is the larger one: no
    gradient."""

    loss_T: Tensor
    clipped_T: Tensor


def clipped_value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    *,
    clip: float | None = None,
) -> ValueLoss:
    """`max((V - R)^2, (V' - R)^2) / 2`, where V' is V kept within `clip` of the old value.

    Sources: PPO (arXiv 1707.06347), equation 9; the bound is that of its first published code, as
    described in arXiv 2005.12729, section 3.

    Args:
        values_T: [T] of the critic that learns; gradients flow through them.
        old_values_T: [T] at the start of the step.
        returns_T: [T], constant.
        clip: how far a value may move from the old one, towards its return, before its gradient
            stops; None for no bound.

    Returns:
        Figures at least float32, float64 where the values are.
    """
    assert clip is None or clip > 0
    dtype = torch.promote_types(values_T.dtype, torch.float32)
    values_T, old_values_T = values_T.to(dtype), old_values_T.detach().to(dtype)
    returns_T = returns_T.detach().to(dtype)
    free_T = (values_T - returns_T).square()
    if clip is None:
        return ValueLoss(free_T / 2, torch.zeros_like(free_T, dtype=torch.bool))
    moved_T = values_T - old_values_T
    # What moved less is taken as it is: the old value and the difference may round to another one.
    kept_T = torch.where(moved_T.abs() <= clip, values_T, old_values_T + moved_T.clamp(-clip, clip))
    bounded_T = (kept_T - returns_T).square()
    return ValueLoss(torch.maximum(free_T, bounded_T) / 2, bounded_T > free_T)
