"""The contract between a policy and whoever collects its actions or trains it.

`act` draws a chunk of actions per observation, `evaluate` gives the log-probability of what was
drawn. What an item draws depends on its own seed alone, never on the batch it stands in, and
`evaluate` of what `act` gave returns the same log-probabilities up to rounding.

Observations are named tensors with a leading batch dimension: "state" float [B, S], "image" and
"wrist_image" uint8 [B, H, W, 3]; "instruction" is a list of B strings.

Legend: B batch, K actions of a chunk, A action size, D coordinates drawn for one action (action
tokens, raw actions, or all points of a noise path).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from m2flow.algorithms.sampling import uniform
from m2flow.errors import UserError

Observations = Mapping[str, Any]
ALL_ROWS = slice(None)
Level = Literal["token", "action", "chunk"]


@dataclass(frozen=True)
class PolicyOutput:
    """What a policy decided for B observations.

    Attributes:
        actions: [B, K, A], as the environment takes them.
        tokens: [B, K, D], what was drawn; give it to `evaluate`.
        logprobs: float32 [B, K, D], or of fewer coordinates where some of them mean nothing.
        values: float32 [B], the critic's estimate; None where the policy has no critic, and where
            the critic shares nothing with what acts: `Policy.values` then gives those of many
            observations at once.
    """

    actions: Tensor
    tokens: Tensor
    logprobs: Tensor
    values: Tensor | None


@dataclass(frozen=True)
class Evaluation:
    """What a policy thinks of given actions; differentiable in its parameters.

    Attributes:
        logprobs: float32 [B, K, D], of the coordinates of `PolicyOutput.logprobs`.
        entropy: of the same shape, of the distribution that each coordinate was drawn from.
        values: float32 [B], or None where the policy has no critic.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


class Pullback(Protocol):
    """Adds to the parameters' gradients what gradients of an `Evaluation` come to; once."""

    def __call__(
        self,
        logprobs_BKD: Tensor,
        entropy_BKD: Tensor | None = None,
        values_B: Tensor | None = None,
        /,
    ) -> None:
        """Take the gradient of each of its parts; None for a part that has none."""


CRITIC_PARTS = ("critic", "value", "value_head")
"""Modules of policies that belong to the critic alone."""


class Policy(nn.Module, ABC):
    """A network that acts and that can judge its actions.

    Attributes:
        horizon: actions that it decides on at a time, where they are more than are carried out.
    """

    horizon: int | None = None

    @abstractmethod
    def act(
        self, observations: Observations, *, seeds: Sequence[int], greedy: bool = False
    ) -> PolicyOutput:
        """Draw a chunk of actions per observation; `greedy` takes the most likely one."""

    @abstractmethod
    def evaluate(self, observations: Observations, tokens: Tensor) -> Evaluation:
        """Return log-probabilities and entropies of `tokens` [B, K, D] under the parameters."""

    @torch.enable_grad()
    def judge(self, observations: Observations, tokens: Tensor) -> tuple[Evaluation, Pullback]:
        """Return what `evaluate` does, detached, and what takes its gradients to the parameters."""
        judged = self.evaluate(observations, tokens)

        def pull(
            logprobs_BKD: Tensor, entropy_BKD: Tensor | None = None, values_B: Tensor | None = None
        ) -> None:
            given = {judged.logprobs: logprobs_BKD}
            if entropy_BKD is not None and judged.entropy.requires_grad:  # noise may be fixed
                given[judged.entropy] = entropy_BKD
            if values_B is not None:
                assert judged.values is not None
                given[judged.values] = values_B
            torch.autograd.backward(list(given), list(given.values()))

        values_B = None if judged.values is None else judged.values.detach()
        return Evaluation(judged.logprobs.detach(), judged.entropy.detach(), values_B), pull

    def values(self, observations: Observations) -> Tensor | None:
        """Return the critic's estimates, float32 [B]; None where the policy has no critic."""
        count = len(next(iter(observations.values())))
        return self.act(observations, seeds=[0] * count, greedy=True).values

    def tokens_of(self, actions_BKA: Tensor) -> Tensor:
        """Return the tokens [B, K, D] of an environment's actions, for behaviour cloning."""
        raise UserError(
            f"{type(self).__name__} does not learn from actions alone", key="warmup.steps"
        )

    def cloning_loss(
        self,
        observations: Observations,
        actions_BHA: Tensor,
        seed: int,
        rows: slice = ALL_ROWS,
    ) -> Tensor:
        """How far the policy is from giving the actions that were shown; differentiable.

        Args:
            observations: what was seen.
            actions_BHA: [B, H, A], the environment's; H is `horizon`, or the chunk without one.
            seed: all chance of the loss follows from it and a row's place in the batch.
            rows: of the batch, those whose loss is computed.

        Returns:
            float32 [], a mean over these rows, by default of the negative log-probability.
        """
        seen = {name: part[rows] for name, part in observations.items()}
        return -self.evaluate(seen, self.tokens_of(actions_BHA[rows])).logprobs.mean()

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the critic's own, on which no action's probability depends."""
        for name in CRITIC_PARTS:
            part = getattr(self, name, None)
            if isinstance(part, nn.Module):
                yield from part.parameters()

    def running_statistics(self) -> list[RunningStatistics]:
        """Running statistics that a trainer keeps up to date, in a fixed order."""
        return []


class RunningStatistics(nn.Module, ABC):
    """What is known of numbers seen so far; nothing is learned by gradients.

    It changes in `take_in` alone. Between `act` and `evaluate` of one step it must not be called.

    Attributes:
        of: which numbers: "state", or "return".
    """

    of: Literal["state", "return"]

    @abstractmethod
    def moments(self, values: Tensor | None) -> Tensor:
        """Float64 sums over values [B, ...] that may be added up over lanes; None: no value."""

    @abstractmethod
    def take_in(self, moments: Tensor) -> None:
        """Add values by their moments."""


def at_level(values_BKD: Tensor, level: Level) -> Tensor:
    """Sum log-probabilities or entropies of tokens to those of actions or whole chunks.

    Returns:
        [B, K, D] for "token", [B, K] for "action", [B] for "chunk".
    """
    if level == "token":
        return values_BKD
    values_BK = _summed(values_BKD)
    return values_BK if level == "action" else _summed(values_BK)


def _summed(values: Tensor) -> Tensor:
    """The sum over the last dimension; without an operation where there is one value alone."""
    return values.squeeze(-1) if values.shape[-1] == 1 else values.sum(dim=-1)


def seed_tensor(seeds: Sequence[int], device: torch.device) -> Tensor:
    """One int64 seed per item."""
    found: Tensor = torch.from_numpy(np.array(seeds, np.int64))  # in half the time of torch's own
    return found if device.type == "cpu" else found.to(device)


def standard_normal(seed_B: Tensor, count: int, first: int = 0) -> Tensor:
    """Standard normal numbers that depend on an item's seed and their position alone.

    Returns:
        float64 [B, count], by inverting the cumulative distribution at `uniform(seed, position)`
        for the positions from `first` on.
    """
    position_C = torch.arange(first, first + count, device=seed_B.device)
    return normal_of(uniform(seed_B.unsqueeze(1), position_C))


def normal_of(uniform: Tensor) -> Tensor:
    """Standard normal numbers from uniform ones in [0, 1), float64."""
    return torch.special.ndtri(uniform + 2.0**-54)  # half a step: 0 would give -inf
