"""`TrainingTurns`, what is learned from whole rollouts turn after turn; `Examples`, for the loss.

What does not depend on the weights is computed once in a step and not in each mini-batch: sums of
log-probabilities, shares of returns, which steps were carried out.

Legend: T turns, K steps of a turn, D coordinates drawn for a step, of which some policies judge
some alone; N what the loss counts: tokens, actions or chunks that were carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.flow import Batch
from m2flow.models.policies.protocol import Level, at_level
from m2flow.workloads.embodied.workers.columns import TURN, lengths_of, observations_of


@dataclass
class TrainingTurns:
    """What is learned from.

    Attributes:
        observations: parts with a row for each turn; lists where they are sentences.
        rollout_T: int64 [T], the rollout's number in its step.
        place_T: int64 [T], which turn of the rollout.
        tokens_TKD, logprobs_TKD: what was drawn, and how likely it was.
        steps_T: int64 [T], steps of the turn that were carried out; others count for nothing.
        advantage: float64 [T], or [T, K] of each action.
        values_T, returns_T: float [T]; None without a critic.
    """

    observations: Mapping[str, Any]
    rollout_T: Tensor
    place_T: Tensor
    tokens_TKD: Tensor
    logprobs_TKD: Tensor
    steps_T: Tensor
    advantage: Tensor
    values_T: Tensor | None
    returns_T: Tensor | None

    def __len__(self) -> int:
        return self.steps_T.numel()

    def examples(self, level: Level, scale: float, *, by_episode: bool) -> Examples:
        """What the loss reads.

        Args:
            level: of what log-probabilities are summed to.
            scale: what values and returns are divided by.
            by_episode: whether all that the loss counts in a rollout weighs 1 together.
        """
        steps = torch.arange(self.logprobs_TKD.shape[1])
        taken_TK = steps < self.steps_T[:, None]
        every = bool(taken_TK.all())
        logprobs = self.logprobs_TKD if every else self.logprobs_TKD * taken_TK[..., None]

        def share(values_T: Tensor | None) -> Tensor | None:
            return None if values_T is None else (values_T / scale).float()

        return Examples(
            self.observations,
            self.tokens_TKD,
            at_level(logprobs, level),
            self.advantage.float(),
            self._weights(level) if by_episode else None,
            share(self.values_T),
            share(self.returns_T),
            None if every else taken_TK,
        )

    def _weights(self, level: Level) -> Tensor:
        """Float32 [T], of each thing in a turn that the loss counts."""
        wide = self.logprobs_TKD.shape[-1] if level == "token" else 1
        chunks = level == "chunk"
        counted_T = (self.steps_T > 0).double() if chunks else self.steps_T.double() * wide
        _, row_T = self.rollout_T.unique(return_inverse=True)
        total_R = counted_T.new_zeros(int(row_T.max()) + 1).index_add(0, row_T, counted_T)
        return total_R.clamp(min=1.0).reciprocal()[row_T].float()


@dataclass
class Examples:
    """Some turns as the loss reads them.

    Attributes:
        observations, tokens_TKD: see `TrainingTurns`.
        old: float [T, K, D], [T, K] or [T] by the level: how likely it was what was drawn.
        advantage: float32 [T], or [T, K] of each action.
        weight_T: float32 [T], of each thing in the turn that the loss counts; None for 1.
        values_T, returns_T: float32 [T], shares of the returns' scale; None without a critic.
        taken_TK: bool [T, K], which steps were carried out; None for all of them.
    """

    observations: Mapping[str, Any]
    tokens_TKD: Tensor
    old: Tensor
    advantage: Tensor
    weight_T: Tensor | None
    values_T: Tensor | None
    returns_T: Tensor | None
    taken_TK: Tensor | None

    def __len__(self) -> int:
        return len(self.tokens_TKD)

    def rows(self, index: Tensor, device: torch.device) -> Examples:
        """Some of the turns, on a device."""

        def some(part: Any) -> Any:
            if isinstance(part, list):
                return [part[row] for row in index.tolist()]
            return None if part is None else part.index_select(0, index).to(device)

        columns = (self.tokens_TKD, self.old, self.advantage, self.weight_T, self.values_T,
                   self.returns_T, self.taken_TK)  # fmt: skip
        return Examples(
            {name: some(part) for name, part in self.observations.items()}, *map(some, columns)
        )

    def carried_out(self, values_TKD: Tensor) -> Tensor:
        """Values [T, K, D], 0 at steps that were not carried out."""
        return values_TKD if self.taken_TK is None else values_TKD * self.taken_TK[..., None]

    def counted(self, values: Tensor) -> Tensor:
        """[N] what of values like `old` the loss counts."""
        if self.taken_TK is None:
            return values.flatten()
        if values.dim() == 1:
            return values[self.taken_TK.any(1)]
        return values[self.taken_TK].flatten()

    def back(self, values_N: Tensor, shape: torch.Size) -> Tensor:
        """[T, K, D] gradients of log-probabilities of that shape, from those of what is counted."""
        old, taken_TK = self.old, self.taken_TK
        if taken_TK is None:
            values = values_N.view(old.shape)
        else:
            counted = taken_TK.any(1) if old.dim() == 1 else taken_TK
            values = torch.zeros_like(old)
            values[counted] = values_N.view(-1, *old.shape[counted.dim() :])
        for _ in range(3 - old.dim()):
            values = values.unsqueeze(-1)
        return self.carried_out(values.expand(shape))

    def spread(self, values: Tensor) -> Tensor:
        """[N] values of turns [T], or of actions [T, K], at everything in them that is counted."""
        wide = values.view(*values.shape, *(1,) * (self.old.dim() - values.dim()))
        return self.counted(wide.expand_as(self.old))


def turns_of(rollouts: Batch) -> TrainingTurns:
    """The turns of whole rollouts, one after another."""

    def column(name: str) -> Any:
        found = f"{TURN}{name}"
        return rollouts[found].values if found in rollouts else None

    counts = torch.tensor(lengths_of(rollouts))
    firsts = counts.cumsum(0) - counts
    return TrainingTurns(
        observations=observations_of(rollouts, TURN),
        rollout_T=torch.tensor(rollouts.ids).repeat_interleave(counts),
        place_T=torch.arange(int(counts.sum())) - firsts.repeat_interleave(counts),
        tokens_TKD=column("tokens"),
        logprobs_TKD=column("logprobs"),
        steps_T=column("steps"),
        advantage=column("advantage"),
        values_T=column("values"),
        returns_T=column("return"),
    )
