"""Coordinate descent: from the best structures, one change at a time, judged by simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from math import inf

from m2flow.plan.choose.draft import Draft, key, obstacle, structure, to_plan
from m2flow.plan.choose.estimate import estimate
from m2flow.plan.choose.judge import Judge
from m2flow.plan.choose.moves import moves
from m2flow.plan.choose.problem import Problem
from m2flow.plan.isolation import isolate

STARTS = 16
"""So many drafts of different structure are simulated before any is changed."""

PATIENCE = 0.004
"""Each change of a draft that is tried makes the draft count for so much slower, relatively: which
draft is changed next."""

WORSE = 1.6
"""A change that looks worse than the draft at hand by more than this factor is not simulated."""

NO_BETTER = 0.02
"""A draft that is not the best so far is changed as if it were so much slower, relatively."""

EVENTS, FEWEST = 700, 16
"""A search ends when its simulations have had so many events for each that is allowed; but a
FEWEST-th of them at least are carried out."""

GAIN = 1e-4
"""Relative seconds that a change must save."""


class Descent:
    """A search among drafts.

    Args:
        problem: what is planned.
        judge: simulates.

    Attributes:
        seconds: of every draft that was simulated; infinite where it is ruled out.
    """

    def __init__(self, problem: Problem, judge: Judge) -> None:
        self.problem, self.judge = problem, judge
        self.seconds: dict[Draft, float] = {}
        self._shapes: dict[tuple[object, ...], float] = {}
        self._best = inf

    def search(self, starts: Iterable[Draft], most: int, known: Iterable[Draft] = ()) -> None:
        """Simulate the starts that look best, then change the best draft, one thing at a time.

        Args:
            starts: where to begin.
            most: simulations from now on.
            known: further starts, which are simulated in any case.
        """
        plans, events = self.judge.num_simulated, self.judge.num_events
        self._best = inf
        order, queue = count(), list[tuple[float, int, Draft, Iterator[Draft]]]()

        def goes_on() -> bool:
            done = self.judge.num_simulated - plans
            spent = self.judge.num_events - events
            return done < most and (spent < EVENTS * most or done < most // FEWEST)

        for draft in chain(filter(self._fits, known), islice(self._unlike(starts), STARTS)):
            if goes_on():
                queue.append((self.judged(draft), next(order), draft, self._changes(draft)))
        heapify(queue)
        while queue and goes_on():
            hopes, _, draft, changes = heappop(queue)
            other = next(changes, None)
            if other is None:
                continue
            heappush(queue, (hopes * (1 + PATIENCE), next(order), draft, changes))
            before, seconds = self._best, self.judged(other)
            hopes = seconds if seconds < before * (1 - GAIN) else seconds * (1 + NO_BETTER)
            heappush(queue, (hopes, next(order), other, self._changes(other)))

    def best(self, most: int) -> list[Draft]:
        """The fastest drafts so far."""
        known = sorted(self.seconds, key=self.seconds.__getitem__)[:most]
        return [draft for draft in known if self.seconds[draft] < inf]

    def _changes(self, draft: Draft) -> Iterator[Draft]:
        """New changes of a draft, those that look best first."""
        most = WORSE * estimate(self.problem, draft)
        for estimated, other in self._ranked(moves(self.problem, draft)):
            if estimated > most:
                return
            if self._is_new(other) and self._fits(other):
                yield other

    def judged(self, draft: Draft) -> float:
        """Seconds of a step, simulated."""
        if draft not in self.seconds:
            shape = key(self.problem, draft)
            if shape not in self._shapes:
                plan = isolate(to_plan(self.problem, draft), self.judge.isolated)
                found = self.judge.candidate(plan, structure(self.problem, draft))
                self._shapes[shape] = inf if found is None else float(found.prediction.seconds)
            self.seconds[draft] = self._shapes[shape]
        self._best = min(self._best, self.seconds[draft])
        return self.seconds[draft]

    def _is_new(self, draft: Draft) -> bool:
        return key(self.problem, draft) not in self._shapes

    def _ranked(self, drafts: Iterable[Draft]) -> list[tuple[float, Draft]]:
        """Each draft once, those that look best first."""
        each = {key(self.problem, draft): draft for draft in drafts}
        rated = [(estimate(self.problem, draft), draft) for draft in each.values()]
        return sorted(rated, key=lambda entry: entry[0])

    def _fits(self, draft: Draft) -> bool:
        """Whether a draft keeps the limits; if not, an example of the reason is kept."""
        reason = obstacle(self.problem, draft)
        if reason is not None and reason not in self.judge.ruled_out.values():
            self.judge.ruled_out[structure(self.problem, draft)] = reason
        return reason is None

    def _unlike(self, drafts: Iterable[Draft]) -> Iterator[Draft]:
        """Those that look best and fit, at most two of each structure."""
        found: dict[frozenset[tuple[int, ...]], int] = {}
        for _, draft in self._ranked(drafts):
            groups: dict[tuple[str, int, int], list[int]] = {}
            for worker, spot in enumerate(draft.spots):
                groups.setdefault(spot.lanes, []).append(worker)
            apart = frozenset(tuple(some) for some in groups.values())
            if found.get(apart, 0) < 2 and self._fits(draft):
                found[apart] = found.get(apart, 0) + 1
                yield draft
