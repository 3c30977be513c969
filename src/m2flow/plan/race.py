"""`Race`: which of a few plans is fastest, by successive halving on measured seconds of real steps.

Every plan trains the same weights, so a step under a plan that loses costs only its slowness. In
each round every entrant runs some steps; the slower half drops out, and the survivors run twice as
many in the next round. An entrant that is clearly slower drops out after a single step. The race
reads no clock: the run that takes the steps notes their seconds.

Steps differ: one with longer answers takes longer under any plan. So what an entrant was seen to
take is weighed against its prediction by how much steps vary and how far predictions are off, as
two measurements of one quantity are. What all predictions are off by together parts no plans, and
is taken out.

Source: successive halving, Karnin, Koren and Somekh 2013; Jamieson and Talwalkar 2016.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from m2flow.engine.plan import Plan

CLEARLY = 1.25
"""An entrant whose step takes so many times the best entrant's drops out at once."""

WON = "won"


@dataclass
class Entrant:
    """A plan in a race.

    Attributes:
        name: how people tell it from the others, such as the mode it resembles.
        plan: what is run.
        predicted: seconds of a step, as the simulation has them; infinite where it has none.
        spread: standard deviation of a step's seconds under one plan; 0 where steps are all alike,
            so that measurements alone count.
        measured: seconds of the steps that it has run.
        verdict: "" while the entrant races, WON, or why it has dropped out.
    """

    name: str
    plan: Plan
    predicted: float
    spread: float = 0.0
    measured: list[float] = field(default_factory=list)
    verdict: str = ""

    @property
    def seconds(self) -> float:
        """Median of the measured seconds; those predicted where no step was measured."""
        return statistics.median(self.measured) if self.measured else self.predicted


@dataclass(frozen=True)
class Tried:
    """What is kept of an entrant.

    Attributes:
        plan: its name.
        predicted: seconds of a step; None for a plan that was a guess.
        measured: seconds of each step under it.
        verdict: what came of it, as `Entrant` says; empty while it races.
    """

    plan: str
    predicted: float | None
    measured: tuple[float, ...]
    verdict: str


def tried(entrants: Sequence[Entrant]) -> tuple[Tried, ...]:
    """What is kept of a race."""
    return tuple(
        Tried(x.name, x.predicted if x.predicted < inf else None, tuple(x.measured), x.verdict)
        for x in entrants
    )


class Race:
    """A race between plans, one step at a time.

    Args:
        entrants: at least one, those predicted to be fastest first. Entrants whose workers stand
            in the same places run one after the other, so that few workers move.
        most_steps: steps after which the race ends and the leader wins.
        error: relative error of the predictions against each other.
    """

    def __init__(self, entrants: Sequence[Entrant], most_steps: int, error: float = 0.1) -> None:
        assert entrants, "a race needs an entrant"
        self._error = error
        self.entrants = tuple(entrants)
        self._steps_left = most_steps
        self._steps_each = 1
        self._queue: list[Entrant] = []
        self._start_round()

    @property
    def open(self) -> bool:
        """Whether any plan is left."""
        return bool(self._racing)

    @property
    def over(self) -> bool:
        """Whether the winner is known."""
        return len(self._racing) <= 1 or self._steps_left <= 0

    @property
    def current(self) -> Entrant:
        """Whose plan the next step is to run under: the winner's, once the race is over."""
        return self.leader if self.over else self._queue[0]

    @property
    def leader(self) -> Entrant:
        """The entrant that is fastest as far as is known."""
        assert self.open, "every plan of the race was ruled out"
        return min(self._racing, key=self.believed)

    def believed(self, entrant: Entrant) -> float:
        """Seconds of a step by prediction and measurement together."""
        expected = entrant.predicted * self._bias
        if not entrant.measured:
            return expected
        if not entrant.spread:
            return entrant.seconds
        for_expected = (self._error * expected) ** -2
        for_measured = len(entrant.measured) * entrant.spread**-2
        total = for_expected * expected + for_measured * entrant.seconds
        return total / (for_expected + for_measured)

    @property
    def _bias(self) -> float:
        """Measured over predicted seconds, the median of the entrants that were measured."""
        ratios = [one.seconds / one.predicted for one in self.entrants if one.measured]
        return statistics.median(ratios) if ratios else 1.0

    def note(self, seconds: float) -> None:
        """Take in what a step under the current entrant's plan has taken."""
        entrant = self.current
        entrant.measured.append(seconds)
        if self.over:
            return
        self._steps_left -= 1
        self._queue.pop(0)
        measured = [one for one in self._racing if one.measured]
        best = min(map(self.believed, measured))
        for one in measured:
            if (seconds := self.believed(one)) > CLEARLY * best:
                self._drop(one, f"{seconds / best:.2f} times the seconds of the best")
        self._go_on()

    def rule_out(self, entrant: Entrant, reason: str) -> None:
        """Take an entrant out of the race because its plan cannot run."""
        self._drop(entrant, reason)
        self._go_on()

    @property
    def _racing(self) -> list[Entrant]:
        return [one for one in self.entrants if one.verdict in ("", WON)]

    def _drop(self, entrant: Entrant, verdict: str) -> None:
        entrant.verdict = verdict
        self._queue = [one for one in self._queue if one is not entrant]

    def _go_on(self) -> None:
        if self._queue or self.over:
            return
        ranked = sorted(self._racing, key=self.believed)
        for one in ranked[(len(ranked) + 1) // 2 :]:
            steps = len(one.measured)
            self._drop(one, f"among the slower half after {steps} step{'s' * (steps > 1)}")
        self._steps_each *= 2
        self._start_round()

    def _start_round(self) -> None:
        """Queue the steps of a round, entrants with the same placements next to each other."""
        racing = self._racing

        def first_alike(one: Entrant) -> int:
            return next(n for n, other in enumerate(racing) if other.plan.stands_as(one.plan))

        ordered = sorted(racing, key=first_alike)
        self._queue = [one for one in ordered for _ in range(self._steps_each)]
