"""What a loss that is computed in pieces gives: its share, not yet divided, and its figures.

Shapes: T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """A piece's share of the loss, not yet divided by the global denominator.

    Attributes:
        loss: scalar, sum of weight x loss over the tokens.
        sums: detached scalars, sums over tokens, named as the loss's `figures`.
    """

    loss: Tensor
    sums: dict[str, Tensor]


def token_sum(values_T: Tensor) -> Tensor:
    """The sum over tokens, detached, as a float64 scalar."""
    return values_T.detach().to(torch.float64).sum()
