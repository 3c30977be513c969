"""What a trainer asks of a policy-gradient algorithm, so that it need not know which one it runs.

Shapes: T completion tokens of B sequences lying one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m2flow.algorithms.aggregation import Aggregation


@dataclass(frozen=True)
class TokenColumns:
    """What is known of each completion token; `lengths_B` [B] int64 sums to T.

    Attributes:
        logprobs_T: under the policy that learns, with gradient.
        old_logprobs_T: under the policy that the ratio is taken against.
        advantages_T: constant.
        lengths_B: tokens of each sequence.
        reference_logprobs_T: under the reference model, where the algorithm has a KL term.
        entropy_T: of the policy at the token, with gradient, where the algorithm asks for it.
        behaviour_logprobs_T: under the policy that drew the tokens, where that is not the policy of
            `old_logprobs_T`; None where it is.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    lengths_B: Tensor
    reference_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    behaviour_logprobs_T: Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """A piece's share of the loss, not yet divided by the global denominator.

    Attributes:
        loss: scalar, sum of weight x loss over the tokens.
        sums: detached scalars, sums over tokens, named as `Algorithm.figures`.
    """

    loss: Tensor
    sums: dict[str, Tensor]


class Algorithm(Protocol):
    """A policy loss that may be computed in pieces."""

    @property
    def aggregation(self) -> Aggregation:
        """How per-token losses become one number."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the per-token figures that `loss` reports."""

    @property
    def needs_reference(self) -> bool:
        """Whether `reference_logprobs_T` must be given."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy_T` must be given, with gradient."""

    @property
    def zero_advantage_is_idle(self) -> bool:
        """Whether a sequence whose advantages are all zero has no gradient."""

    def loss(self, columns: TokenColumns) -> LossTerms:
        """The un-normalised loss of some whole sequences."""


def token_sum(values_T: Tensor) -> Tensor:
    """The sum over tokens, detached, as a float64 scalar."""
    return values_T.detach().to(torch.float64).sum()
