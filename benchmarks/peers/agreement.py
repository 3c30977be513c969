"""Do two sides learn alike? Their mean rewards over the first and the last steps, with the noise.

Both sides answer the same prompts in the same steps, so the difference is taken prompt by prompt
and its standard error over prompts: samples of one group are not independent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from peers.wire import StepRecord

STANDARD_ERRORS = 3.0
BETWEEN_RUNS = 0.03
"""Allowance for what sampling alone does to a training run: two runs of one side differ by it."""


@dataclass(frozen=True)
class Agreement:
    """Mean rewards over some steps; `noise` is the largest difference that means nothing."""

    steps: int
    peer: float
    ours: float
    standard_error: float

    @property
    def difference(self) -> float:
        return self.ours - self.peer

    @property
    def noise(self) -> float:
        return STANDARD_ERRORS * self.standard_error + BETWEEN_RUNS

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= self.noise


def compare_rewards(
    peer: Sequence[StepRecord], ours: Sequence[StepRecord], group: int
) -> dict[str, Agreement]:
    """Agreement over the first and the last steps: an eighth each, at least two."""
    count = max(2, len(ours) // 8)
    return {
        "first": _agreement(peer[:count], ours[:count], group),
        "last": _agreement(peer[-count:], ours[-count:], group),
    }


def _agreement(peer: Sequence[StepRecord], ours: Sequence[StepRecord], group: int) -> Agreement:
    theirs_G, ours_G = _group_means(peer, group), _group_means(ours, group)
    differences_G = [a - b for a, b in zip(ours_G, theirs_G, strict=True)]
    return Agreement(
        len(ours),
        statistics.mean(theirs_G),
        statistics.mean(ours_G),
        statistics.stdev(differences_G) / math.sqrt(len(differences_G)),
    )


def _group_means(steps: Sequence[StepRecord], group: int) -> list[float]:
    return [
        statistics.mean(step.rewards[at : at + group])
        for step in steps
        for at in range(0, len(step.rewards), group)
    ]
