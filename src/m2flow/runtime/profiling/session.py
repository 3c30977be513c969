"""`Session`: real steps of a flow on real lanes, under a few plans in turn.

Workers are fresh under each plan, so every plan does the same work on the same weights, and what
they have learned is thrown away. The plans take turns until single measurements agree well enough
or the time is up, so that a noisy moment of the machine spoils no plan alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.flow.batch import Batch
from m2flow.flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.plan.measured import Evidence, Observed
from m2flow.plan.measured.curves import NEAR
from m2flow.plan.measured.samples import LayoutKey
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.runner import StepResult

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.run import Run

GOOD_ERROR = 0.03
"""Relative standard error with which the typical time of every call that matters is known."""

VISIT_SECONDS = 0.5
"""A visit to a plan measures at least so long, if the budget has room for it."""

FEWEST_STEPS, MOST_STEPS = 3, 8
"""Measured steps of a visit; with more the weights would move away from where they begin."""

MOVES = 2

ROUNDS = 2
"""Each plan is visited so often at least: a moment of the machine must not decide alone."""

TOO_SLOW = 1.1
"""Gangs are slow where steps take more than so many times those of the fastest plan. Other plans
with them are not tried: gangs are used for their speed, or where nothing else has room."""


class Session:
    """Visits to plans on one pool of lanes.

    Args:
        graph: of the steps.
        pool: the lanes.
        make_flow, batches: as for `measure_flow`.
        plans: to visit.
        deadline: second of the monotonic clock at which the time is up.

    Attributes:
        evidence: what was measured.
        visits: how many there were.
    """

    def __init__(
        self,
        graph: FlowGraph,
        pool: LanePool,
        make_flow: Callable[[], Flow],
        batches: Sequence[Batch],
        plans: Sequence[Plan],
        deadline: float,
    ) -> None:
        self.pool, self.make_flow, self.batches = pool, make_flow, batches
        self.plans, self.deadline = plans, deadline
        self.evidence, self.visits = Evidence(graph), 0
        self._own = [Evidence(graph) for _ in plans]
        self._seconds = [0.0] * len(plans)
        self._times = [0] * len(plans)
        self._steps: dict[int, float] = {}
        self._moved: set[tuple[str, int]] = set()
        self._gauged: set[int] = set()

    def next(self) -> int | None:
        """The plan to visit: each in turn, then where doubt is greatest; None when it is enough."""
        left = self.deadline - time.monotonic()
        usual = max(self._seconds)
        fits = [
            number
            for number in self._open()
            if not self.visits or (self._seconds[number] or usual) <= left
        ]
        due = [number for number in fits if self._times[number] < ROUNDS]
        if due:
            return min(due, key=lambda number: (self._times[number], number))
        if self.error <= GOOD_ERROR:
            return None
        errors = self.evidence.errors()
        return max(fits, key=lambda number: self._doubt(number, errors), default=None)

    def _open(self) -> list[int]:
        """The plans worth another visit: not those whose gangs are all known to be slow."""
        most = TOO_SLOW * min(self._steps.values(), default=0.0)
        gangs = {number: _gangs(plan) for number, plan in enumerate(self.plans)}
        slow = _union(gangs[number] for number, step in self._steps.items() if step > most)
        slow -= _union(gangs[number] for number, step in self._steps.items() if step <= most)
        return [number for number, some in gangs.items() if not some or not some <= slow]

    @property
    def error(self) -> float:
        """The largest relative standard error of what plans worth another visit measure."""
        errors = self.evidence.errors()
        return max((self._doubt(number, errors) for number in self._open()), default=1.0)

    def _doubt(self, number: int, errors: Mapping[tuple[LayoutKey, float], float]) -> float:
        """The largest error among the points that a plan measures."""
        own = {
            (where, point.size)
            for where, some in self._own[number].points().items()
            for point in some
        }
        return max(
            (
                error
                for (where, size), error in errors.items()
                if any(w == where and abs(s - size) <= size * (NEAR - 1) for w, s in own)
            ),
            default=0.0,
        )

    def visit(self, number: int) -> None:
        """Bring fresh workers up under a plan, warm them up, and run a few steps."""
        start = time.monotonic()
        num_items = len(self.batches[0])
        with launch(
            self.make_flow(), items_per_step=num_items, plan=self.plans[number], lanes=self.pool
        ) as run:
            forever = cycle(self.batches)
            loaded = time.monotonic()
            first = list(run.steps(islice(forever, 1)))
            seconds = time.monotonic() - loaded
            to_come = max(1, len(self.plans) - self.visits)
            count = _count(seconds, (self.deadline - time.monotonic()) / to_come)
            results: list[StepResult] = list(run.steps(islice(forever, count)))
            moves = self._moves(run)
            gauged = self._gauge(run, number) if results else ()
            seen = Observed.of(
                run.plan,
                num_items,
                results or first,
                warm=bool(results),
                moves=moves,
                gauged=gauged,
            )
        self.evidence.add(seen)
        self._own[number].add(seen)
        self._seconds[number] = time.monotonic() - start
        if results:
            self._steps[number] = statistics.median(result.seconds for result in results)
        self._times[number] += 1
        self.visits += 1

    def _moves(self, run: Run) -> list[tuple[str, str, float]]:
        """Put workers' states away and bring them back, on lanes that have room for all of them.

        Each worker once for each size of its gangs. A call that does nothing is subtracted: what is
        left is the lanes' own time.
        """
        if any(lane.memory_bytes is not None for lane in run.plan.lanes):
            return []  # the steps themselves have shown moves
        moves = []
        for worker in _stateful(run):
            layout = worker, len(run.plan.placements[worker].replicas[0])
            if layout in self._moved:
                continue
            self._moved.add(layout)
            for number in range(MOVES + 1):
                nothing = _timed(run, worker, "state_bytes")
                for what in ("offload", "onload"):
                    seconds = max(0.0, _timed(run, worker, what) - nothing)
                    if number:  # the first time makes room for the state elsewhere
                        moves.append((worker, what, seconds))
        return moves

    def _gauge(self, run: Run, number: int) -> tuple[Span, ...]:
        """Spans of a step in which lanes say what calls take of memory: once for each plan.

        Before it each state comes back from being away, without what it only keeps for speed, such
        as the room for keys and values of earlier calls.
        """
        if number in self._gauged:
            return ()
        self._gauged.add(number)
        if all(lane.memory_bytes is None for lane in run.plan.lanes):
            for worker in _stateful(run):
                for what in ("offload", "onload"):
                    run.worker_call_everywhere(worker, what)
        self._have_gauged(on=True)
        try:
            return tuple(run.step(self.batches[number % len(self.batches)]).spans)
        finally:
            self._have_gauged(on=False)

    def _have_gauged(self, *, on: bool) -> None:
        from m2flow.runtime.lane.orders import GaugeMemory

        for lane in self.pool.lanes:
            self.pool.send(lane.id, GaugeMemory(on))

    @property
    def complete(self) -> bool:
        """Whether every plan that is worth it was visited."""
        return all(self._times[number] for number in self._open())

    def account(self) -> str:
        """How far it has come, in words."""
        left = max(0.0, self.deadline - time.monotonic())
        rounds = f"{self.visits} visits to {len(self.plans)} plans"
        return f"{rounds}: error {self.error:.1%}, {left:.0f} s left"


def _gangs(plan: Plan) -> frozenset[tuple[str, int]]:
    """Workers whose replicas are several lanes, and how many."""
    return frozenset(
        (worker, len(spot.replicas[0]))
        for worker, spot in plan.placements.items()
        if len(spot.replicas[0]) > 1
    )


def _union(sets: Iterable[frozenset[tuple[str, int]]]) -> set[tuple[str, int]]:
    return {one for some in sets for one in some}


def _stateful(run: Run) -> list[str]:
    """The workers of a run's plan, without pure functions."""
    functions = {node.worker for node in run.graph.nodes if node.is_function}
    return sorted(run.plan.placements.keys() - functions)


def _count(seconds: float, share: float) -> int:
    """How many steps to measure after a first one of so many seconds; none if time is short."""
    wanted = max(FEWEST_STEPS, min(MOST_STEPS, math.ceil(VISIT_SECONDS / max(seconds, 1e-6))))
    affordable = int(share / max(seconds, 1e-6))
    return max(0, min(wanted, affordable))


def _timed(run: Run, worker: str, method: str) -> float:
    start = time.perf_counter()
    run.worker_call_everywhere(worker, method)
    return time.perf_counter() - start
