"""Which problems a step asks, where that follows from how earlier steps went.

Three things make it so. A step may hold spare problems, asked in place of those whose answers are
all worth the same; a spare that was not asked is the first to be handed out again, so that no
problem of the walk is left out and none is asked twice. Answers that have not ended in their step
are carried over, and their problems are the first of a later step. And a curriculum prefers the
problems that the policy solves now and then, by the rate at which it has solved each so far.

Steps may overlap: the problems of a step follow from the results of the steps at least `lag` before
it and from no other, so that they do not depend on which of them happens to end first. The state is
plain data and small; a sampler that is given it goes on as if it had never stopped. Standard
library only: this knows neither texts nor tensors, and `m2flow.plan.file` writes and reads states.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from m2flow.workloads.reasoning.tasks.problem import generator

MEMORY = 0.5
"""Share of the rate before in the rate after a further measurement."""

TINIEST = 2.0**-1074
"""Stands for a draw of 0, which has no logarithm."""


@dataclass(frozen=True)
class Asked:
    """A problem that is handed out.

    Attributes:
        number: of the problem.
        turn: how many were handed out before it in the run; what is drawn for it follows from this.
    """

    number: int
    turn: int


@dataclass(frozen=True)
class Curriculum:
    """A preference for problems of middling difficulty.

    Attributes:
        rows: problems that there are, numbered from 0.
        low, high: rates of success that count as middling, both included.
        outside: weight of a problem beyond them, where one within, or one never asked, weighs 1.
    """

    rows: int
    low: float
    high: float
    outside: float

    def weight(self, rate: float | None) -> float:
        """How strongly a problem with this rate is wanted; None: never asked."""
        return 1.0 if rate is None or self.low <= rate <= self.high else self.outside


@dataclass(frozen=True)
class StepFeedback:
    """What is known of a step that is done.

    Attributes:
        unasked: spares that were not asked.
        rates: numbers of problems, each with the share of its answers that were right.
        carried: number and turn of problems whose answers go on in a later step.
    """

    unasked: list[int]
    rates: list[tuple[int, float]]
    carried: list[tuple[int, int]]


@dataclass
class _State:
    """What a step's problems follow from.

    Attributes:
        applied: the last step whose result is in it; -1 for none.
        next: the next problem of the walk, or turn of a curriculum.
        returned: problems that were handed out and not asked, the lowest first.
        rates: of success, by problem.
        carried: number and turn of problems that are asked again before any other.
    """

    applied: int
    next: int
    returned: list[int]
    rates: dict[int, float]
    carried: list[tuple[int, int]]


@dataclass
class SamplerState(_State):
    """What a sampler needs that begins with a step, as `sampler.json` of a checkpoint has it.

    Attributes:
        step: this one; all before it are done.
        told: how those of them went whose results are not applied, by step.
    """

    step: int
    told: dict[int, StepFeedback]


class Sampler:
    """Hands out the problems of one step after another.

    Args:
        seed: of the run.
        slots: problems that a step asks at once.
        spares: further ones of each.
        lag: a step's problems follow from results of steps at least so many before it.
        curriculum: a preference; None for the walk, in which every problem has its turn.
    """

    def __init__(
        self, *, seed: int, slots: int, spares: int, lag: int, curriculum: Curriculum | None = None
    ) -> None:
        assert lag >= 1
        self.seed, self.slots, self.spares, self.lag = seed, slots, spares, lag
        self.curriculum = curriculum
        self._now = _State(-1, 0, [], {}, [])
        self._before: dict[int, _State] = {}  # of steps in flight: where they began
        self._handed: dict[int, list[list[Asked]]] = {}
        self._told: dict[int, StepFeedback] = {}
        self._listening = False
        self._figures: dict[int, dict[str, float]] = {}

    def asked(self, step: int) -> list[list[Asked]]:
        """The problems of a step: for each slot the first, then its spares. Steps go in order."""
        for earlier in range(self._now.applied + 1, step - self.lag + 1):
            # A profile takes batches and tells nothing; a run tells all that is due.
            assert earlier in self._told or not self._listening, f"{step} without {earlier}"
            self._apply(earlier)
        self._before[step] = _State(**_copied(self._now))
        count = self.slots * (1 + self.spares)
        found = self._walked(count) if self.curriculum is None else self._chosen(step, count)
        each = [found[slot :: self.slots] for slot in range(self.slots)]
        self._handed[step] = each
        return each

    def figures_of(self, step: int) -> dict[str, float]:
        """What a curriculum knew of the problems that a step asked, until the next is done."""
        return self._figures.get(step, {})

    def note(
        self,
        step: int,
        num_asked: Sequence[int],
        rates: Sequence[tuple[int, float]],
        carried: Collection[int] = (),
    ) -> list[Asked]:
        """Take in how a step went.

        Args:
            step: its number; steps come in order.
            num_asked: of each slot's problems, how many were asked.
            rates: numbers of problems, each with the share of its answers that were right.
            carried: slots whose answers go on in a later step.

        Returns:
            the problem that each slot asked last.
        """
        self._listening = True
        self._before = {at: state for at, state in self._before.items() if at > step}
        self._figures = {at: figures for at, figures in self._figures.items() if at >= step}
        handed = self._handed.pop(step)
        unasked = [
            one.number
            for slot, count in zip(handed, num_asked, strict=True)
            for one in slot[count:]
        ]
        last = [slot[count - 1] for slot, count in zip(handed, num_asked, strict=True)]
        again = [(last[slot].number, last[slot].turn) for slot in sorted(carried)]
        self._told[step] = StepFeedback(unasked, list(rates), again)
        oldest = min((state.applied for state in self._before.values()), default=self._now.applied)
        self._told = {at: told for at, told in self._told.items() if at > oldest}
        return last

    def carried(self, step: int) -> list[int]:
        """Turns of the problems whose answers go on in this step or a later one; all steps before
        it are done."""
        began = self._before.get(step, self._now)
        told = [one.carried for at, one in self._told.items() if began.applied < at < step]
        return [turn for carried in (began.carried, *told) for _, turn in carried]

    def state(self, step: int) -> SamplerState:
        """What a sampler needs that begins with a step, all before which are done."""
        began = self._before.get(step, self._now)
        told = {at: one for at, one in self._told.items() if began.applied < at < step}
        return SamplerState(**_copied(began), step=step, told=told)

    def restore(self, state: SamplerState) -> None:
        """Go on where another sampler was."""
        self._now = _State(**_copied(state))
        self._before, self._handed, self._told = {}, {}, dict(state.told)

    def _apply(self, step: int) -> None:
        told = self._told.get(step, StepFeedback([], [], []))
        now = self._now
        now.applied = step
        now.carried += told.carried
        if self.curriculum is None:
            now.returned = sorted([*now.returned, *told.unasked])
        for number, rate in told.rates if self.curriculum is not None else ():
            before = now.rates.get(number)
            now.rates[number] = rate if before is None else MEMORY * before + (1 - MEMORY) * rate

    def _walked(self, count: int) -> list[Asked]:
        """The next problems: those whose answers go on, those that came back, and then those that
        never were out."""
        now = self._now
        going_on, now.carried = now.carried[:count], now.carried[count:]
        count -= len(going_on)
        again, now.returned = now.returned[:count], now.returned[count:]
        first, now.next = now.next, now.next + count - len(again)
        new = [Asked(number, number) for number in (*again, *range(first, now.next))]
        return [*(Asked(*one) for one in going_on), *new]

    def _chosen(self, step: int, count: int) -> list[Asked]:
        """Problems by weight, without asking one twice unless there are too few.

        Each draws a key, `log(u) / weight` with u uniform, and the largest keys are taken
        (Efraimidis and Spirakis 2006, algorithm A, whose `u ** (1 / weight)` is 0 for small
        weights): of what is left each is taken in proportion to its weight.
        """
        curriculum, now = self.curriculum, self._now
        assert curriculum is not None
        random = generator("curriculum", self.seed, step)
        keys = [
            math.log(random.random() or TINIEST) / curriculum.weight(now.rates.get(number))
            for number in range(curriculum.rows)
        ]
        order = heapq.nsmallest(count, range(curriculum.rows), key=lambda number: -keys[number])
        numbers = [order[place % len(order)] for place in range(count)]
        rates = [now.rates.get(number) for number in numbers[: self.slots]]
        known = [rate for rate in rates if rate is not None]
        within = sum(curriculum.low <= rate <= curriculum.high for rate in known)
        self._figures[step] = {
            "sampling/known_share": len(known) / len(rates),
            "sampling/in_band_share": within / len(rates),
        }
        first, now.next = now.next, now.next + count
        return [Asked(number, first + place) for place, number in enumerate(numbers)]


def _copied(state: _State) -> dict[str, Any]:
    """What a `_State` holds, in lists and dictionaries of its own: rates are as many as rows."""
    values = ((one.name, getattr(state, one.name)) for one in fields(_State))
    return {name: value if isinstance(value, int) else value.copy() for name, value in values}
