"""Coordinate descent: from the best structures, one change at a time, judged by simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from math import inf

from m2flow.engine.plan import Plan
from m2flow.plan.choose.draft import Draft, key, obstacle, structure, to_plan
from m2flow.plan.choose.estimate import estimate
from m2flow.plan.choose.judge import Judge
from m2flow.plan.choose.moves import in_groups, moves
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.choose.structures import with_work
from m2flow.plan.isolation import isolate
from m2flow.plan.prediction import differ

STARTS = 16
"""So many drafts of different structure are simulated before any is changed."""

PATIENCE = 0.004
"""Each change of a draft that is tried makes the draft count for so much slower, relatively: which
draft is changed next."""

WORSE = 1.6
"""What looks worse than the draft at hand, or than the best start, by more than this factor is not
simulated."""

NO_BETTER = 0.02
"""A draft that is not the best so far is changed as if it were so much slower, relatively."""

EVENTS, FEWEST = 700, 16
"""A search ends when its simulations have had so many events for each that is allowed; but a
FEWEST-th of them at least are carried out."""


class Descent:
    """A search among drafts.

    Args:
        problem: what is planned.
        judge: simulates.
    """

    def __init__(self, problem: PlanningProblem, judge: Judge) -> None:
        self.problem, self.judge = problem, judge
        self._found: dict[tuple[object, ...], tuple[float, Draft]] = {}

    def search(self, starts: Iterable[Draft], most: int, known: Iterable[Draft] = ()) -> None:
        """Simulate the starts that look best, then change the best draft, one thing at a time.

        Args:
            starts: where to begin.
            most: simulations from now on.
            known: further starts, which are simulated in any case.
        """
        plans, events = self.judge.num_simulated, self.judge.num_events
        order, queue = count(), list[tuple[float, int, Draft, Iterator[Draft]]]()

        def goes_on() -> bool:
            done = self.judge.num_simulated - plans
            spent = self.judge.num_events - events
            return done < most and (spent < EVENTS * most or done < most // FEWEST)

        every = chain(filter(self._fits, known), islice(self._unlike(starts), STARTS))
        for draft in chain.from_iterable(map(self._with_groups, every)):
            if goes_on():
                queue.append((self._judged(draft), next(order), draft, self._changes(draft)))
        heapify(queue)
        best = queue[0][0] if queue else inf
        while queue and goes_on():
            hopes, _, draft, changes = heappop(queue)
            other = next(changes, None)
            if other is None:
                continue
            heappush(queue, (hopes * (1 + PATIENCE), next(order), draft, changes))
            seconds = self._judged(other)
            hopes = seconds if seconds < best else seconds * (1 + NO_BETTER)
            best = min(best, seconds)
            heappush(queue, (hopes, next(order), other, self._changes(other)))

    def best(self, most: int, staleness: int) -> list[Draft]:
        """The fastest drafts of a staleness that differ, so many at most."""
        own = [one for one in self._found.values() if one[1].staleness == staleness]
        kept: list[tuple[Draft, Plan]] = []
        for seconds, draft in sorted(own, key=lambda one: one[0]):
            plan = to_plan(self.problem, draft)
            if seconds == inf or len(kept) >= most:
                break
            if all(differ(plan, other) for _, other in kept):
                kept.append((draft, plan))
        return [draft for draft, _ in kept]

    def _changes(self, draft: Draft) -> Iterator[Draft]:
        """New changes of a draft, those that look best first."""
        most = WORSE * estimate(self.problem, draft)
        for estimated, other in self._ranked(moves(self.problem, draft)):
            if estimated > most:
                return
            if key(self.problem, other) not in self._found and self._fits(other):
                yield other

    def _with_groups(self, draft: Draft) -> Iterator[Draft]:
        """A draft, and the same with groups in its loops, whose gain no estimate knows."""
        yield draft
        grouped = in_groups(self.problem, draft)
        if grouped is not None and self._fits(grouped):
            yield grouped

    def _judged(self, draft: Draft) -> float:
        """Seconds of a step, simulated; infinite where the draft is ruled out."""
        shape = key(self.problem, draft)
        if shape not in self._found:
            plan = isolate(to_plan(self.problem, draft), self.judge.isolated)
            found = self.judge.candidate(plan, structure(self.problem, draft))
            seconds = inf if found is None else float(found.prediction.seconds)
            self._found[shape] = seconds, draft
        return self._found[shape][0]

    def _ranked(self, drafts: Iterable[Draft]) -> list[tuple[float, Draft]]:
        """Drafts with their estimates, the ones that look best first."""
        rated = [(estimate(self.problem, draft), draft) for draft in drafts]
        return sorted(rated, key=lambda entry: entry[0])

    def _fits(self, draft: Draft) -> bool:
        """Whether a draft keeps the limits; if not, an example of the reason is kept."""
        reason = obstacle(self.problem, draft)
        if reason is not None and reason not in self.judge.ruled_out.values():
            self.judge.ruled_out[structure(self.problem, draft)] = reason
        return reason is None

    def _unlike(self, drafts: Iterable[Draft]) -> Iterator[Draft]:
        """Drafts that look best and fit, at most two of each structure of workers with work."""
        found: dict[tuple[tuple[str, int], ...], set[object]] = {}
        heavy, most = with_work(self.problem), inf
        for estimated, draft in self._ranked(drafts):
            if estimated > most:
                return
            lanes = [draft.spots[worker].lanes for worker in heavy]
            alike = found.setdefault(tuple((at[0], lanes.index(at)) for at in lanes), set())
            shape = key(self.problem, draft)
            if len(alike) < 2 and shape not in alike and self._fits(draft):
                alike.add(shape)
                most = min(most, WORSE * estimated)
                yield draft
