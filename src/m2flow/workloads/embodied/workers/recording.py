"""`Recording`: what a rollout has gone through, turn by turn, and what is learned from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from m2flow.workloads.embodied.workers.columns import INSTRUCTION


@dataclass
class Episode:
    """What is told of an episode.

    Attributes:
        reward: the sum of all rewards.
        steps: environment steps.
        success_once: the task stood solved after any step.
        success: it stood solved after the last one.
    """

    reward: float = 0.0
    steps: int = 0
    success_once: bool = False
    success: bool = False

    def figures(self) -> dict[str, float]:
        """By name, for a column of Python values."""
        return {
            "return": self.reward,
            "length": float(self.steps),
            "success_once": float(self.success_once),
            "success": float(self.success),
        }


@dataclass
class Recording:
    """One rollout.

    Attributes:
        seed, state: with which it began; the state is negative where the seed decides.
        single: it is over with its first episode.
        now: the observation that the next turn is decided on.
        turns: by name of a figure, one entry for each turn.
        cuts: observations at which an episode was cut off, in order.
        episodes: those that are over.
        episode: the one that runs.
        steps: environment steps taken, those of discarded episodes too.
        failed: episodes that were given up.
        film: pictures of the first episode, uint8 [H, W, 3] each; None where nobody wants them.
    """

    seed: int
    state: int
    single: bool
    now: Mapping[str, Any]
    turns: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    cuts: list[Mapping[str, Any]] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    episode: Episode = field(default_factory=Episode)
    steps: int = 0
    failed: int = 0
    film: list[Tensor] | None = None
    _kept: int = 0  # turns of episodes that are over

    def add(
        self,
        acted: Mapping[str, Tensor],
        reward_K: Tensor,
        steps: int,
        *,
        success: bool,
        success_once: bool,
    ) -> None:
        """A turn of the running episode."""
        for name, part in self.now.items():
            self.turns[f"observation.{name}"].append(part)
        for name, figure in acted.items():
            self.turns[name].append(figure)
        self.turns["reward"].append(reward_K)
        self.turns["steps"].append(steps)
        self.turns["ends"].append(False)
        self.turns["cut"].append(False)
        self.steps += steps
        running = self.episode
        running.reward += float(reward_K.sum())
        running.steps += steps
        running.success_once |= success_once
        running.success = success

    def end(self, *, terminated: bool) -> None:
        """The episode is over with the last turn; one that did not terminate was cut off."""
        self.turns["ends"][-1] = True
        if not terminated:
            self._cut()
        self.episodes.append(self.episode)
        self.episode, self._kept = Episode(), len(self.turns["steps"])

    def stop(self) -> None:
        """The rollout is over; an episode that still runs is cut off here.

        It is told of only where it is the rollout's only one.
        """
        if len(self.turns["steps"]) > self._kept:
            if self.single:
                self.end(terminated=False)
            else:
                self._cut()

    @property
    def waits(self) -> bool:
        """Whether no episode runs: the next one has to begin."""
        return self._kept == len(self.turns["steps"]) and bool(self.episodes or self.failed)

    def is_over(self, horizon: int) -> bool:
        """Whether the rollout has gone on for long enough, in environment steps."""
        once = self.single and bool(self.episodes or self.failed)
        return once or self.steps >= horizon

    def fail(self, steps: int) -> None:
        """The running episode was given up: nothing is learned from it.

        Args:
            steps: the most that its last turn may have taken.
        """
        for column in self.turns.values():
            del column[self._kept :]
        self.failed += 1
        self.steps += steps
        self.episode = Episode()

    def _cut(self) -> None:
        self.turns["cut"][-1] = True
        self.cuts.append(self.now)

    def rows(self) -> dict[str, Any]:
        """Figures of all turns, stacked; sentences stay a list. Nothing, if there is no turn."""
        return {name: _stacked(name, column) for name, column in self.turns.items() if column}

    def cut_rows(self) -> dict[str, Any]:
        """Observations at which episodes were cut off, stacked."""
        names = self.cuts[0] if self.cuts else ()
        return {name: _stacked(name, [one[name] for one in self.cuts]) for name in names}


def _stacked(name: str, column: list[Any]) -> Any:
    if name.endswith(INSTRUCTION):
        return list(column)
    if column and isinstance(column[0], Tensor):
        return torch.stack(column)
    return torch.tensor(column)
