"""PPO with a critic, by composition only: every formula lives in a file of its own.

The policy's loss is GRPO's clipped surrogate, on advantages of tokens instead of answers; the
critic's is the bounded squared error. Sources: the files composed.

Shapes: T completion tokens of B sequences lying one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m2flow.algorithms.aggregation import Aggregation, denominator, token_weights
from m2flow.algorithms.loss import LossTerms, token_sum
from m2flow.algorithms.value_loss import clipped_value_loss


@dataclass(frozen=True)
class CriticLoss:
    """How a critic learns.

    Attributes:
        value_clip: how far a value may move towards its return, from the one at the start of the
            step, before its gradient stops; None for no bound.
        aggregation: how per-token losses become one number.
        token_budget: what "sequence-mean-token-sum" divides a sequence's sum by.
    """

    value_clip: float | None = 0.2
    aggregation: Aggregation = "token-mean"
    token_budget: int = 1

    figures = ("clip_fraction", "value", "return", "return_square", "error", "error_square")
    """Sums of `loss`; a return's error is what is left of it without the value before the step."""

    def denominator(self, lengths_B: Tensor) -> int:
        """What the un-normalised loss of all sequences is divided by."""
        return denominator(lengths_B, self.aggregation, self.token_budget)

    def loss(
        self,
        values_T: Tensor,
        old_values_T: Tensor,
        returns_T: Tensor,
        lengths_B: Tensor,
    ) -> LossTerms:
        """The un-normalised loss of some whole sequences; see `clipped_value_loss`."""
        figures = clipped_value_loss(values_T, old_values_T, returns_T, clip=self.value_clip)
        errors_T = returns_T.to(torch.float64) - old_values_T.to(torch.float64)
        sums = {
            "clip_fraction": token_sum(figures.clipped_T),
            "value": token_sum(old_values_T),
            "return": token_sum(returns_T),
            "return_square": token_sum(returns_T.to(torch.float64).square()),
            "error": token_sum(errors_T),
            "error_square": token_sum(errors_T.square()),
        }
        loss_T = figures.loss_T
        weights_T = token_weights(lengths_B, self.aggregation, dtype=loss_T.dtype)
        return LossTerms((weights_T * loss_T).sum(), sums)


def explained_variance(sums: dict[str, float], tokens: float) -> float:
    """`1 - var(return - value) / var(return)` from the sums of `CriticLoss.loss`.

    1 for a critic that knows the returns, 0 for one that knows no more than their mean, less for
    one that misleads; 0 where all returns are the same.
    """
    if tokens < 1:
        return 0.0
    spread = sums["return_square"] / tokens - (sums["return"] / tokens) ** 2
    left = sums["error_square"] / tokens - (sums["error"] / tokens) ** 2
    return 1 - left / spread if spread > 1e-12 else 0.0
