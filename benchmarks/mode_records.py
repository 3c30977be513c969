"""What is known of one plan on one workload, and what the noise of the machine is.

The same plan runs under two names, `TWINS`. How far the two are apart is the noise floor: a
difference between two plans is told only where it is larger.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from m2flow.engine.plan import Plan

FIXED = ("collocated", "disaggregated", "hybrid")
TWINS = ("collocated", "collocated again")
AUTO, TRY3 = "auto", "try3"


@dataclass
class Record:
    """A plan on a workload.

    Attributes:
        plan: what was run.
        predicted: seconds of a step, for each round.
        measured: seconds of the steps counted, for each round.
        rewards: of the first step.
    """

    plan: Plan
    predicted: list[float] = field(default_factory=list)
    measured: list[list[float]] = field(default_factory=list)
    rewards: list[float] | None = None

    @property
    def median(self) -> float:
        return statistics.median(self._seconds)

    @property
    def medians(self) -> list[float]:
        """Of each round."""
        return [statistics.median(some) for some in self.measured]

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self._seconds, n=4)
        return (high - low) / 2 / self.median

    @property
    def errors(self) -> list[float]:
        """Of each round, predicted over measured seconds, less 1."""
        return [one / other - 1 for one, other in zip(self.predicted, self.medians, strict=False)]

    @property
    def expected(self) -> float | None:
        """The median of the predicted seconds."""
        return statistics.median(self.predicted) if self.predicted else None

    @property
    def error(self) -> float | None:
        """Expected over measured seconds, less 1, over all rounds."""
        return None if self.expected is None else self.expected / self.median - 1

    @property
    def _seconds(self) -> list[float]:
        return [seconds for some in self.measured for seconds in some]


def noise_floor(records: Mapping[str, Record]) -> float:
    """The largest relative difference between the twins: over all rounds, and in any of them."""
    one, other = (records[name] for name in TWINS)
    pairs = [(one.median, other.median), *zip(one.medians, other.medians, strict=True)]
    return max(abs(a / b - 1) for a, b in pairs)


def against(records: Mapping[str, Record], name: str, others: Sequence[str]) -> float:
    """How much a plan's step is shorter than that of the best of others, relative to its own."""
    return min(records[other].median for other in others) / records[name].median - 1


def verdict(difference: float, floor: float) -> str:
    """In a word, where a difference is no more than the noise."""
    if abs(difference) <= floor:
        return "as fast"
    return "faster" if difference > 0 else "slower"
