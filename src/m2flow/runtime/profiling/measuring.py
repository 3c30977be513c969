"""Measuring a flow on purpose: real steps on real lanes, under a few plans in turn.

Workers are fresh under each plan, so every plan does the same work on the same weights, and what
they have learned is thrown away. The plans take turns, so that a noisy moment of the machine spoils
no plan alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.engine.spans import Span
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.plan import isolated_workers
from m2flow.plan.profile import LinkCost, Profile
from m2flow.plan.profile.evidence import Evidence
from m2flow.plan.profile.trials import trial_plans
from m2flow.plan.units import BytesPerSecond, Seconds
from m2flow.runtime.driver.starting import isolation_of, run_on, specs_of
from m2flow.runtime.transport.table import ASSUMED

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.run import Run

BUDGET_SECONDS = 60.0

MESSAGE_BYTES = 64 * 1024
"""Size of the message for which the way between two lanes is chosen."""

FASTEST = 1e12
"""Bytes a second of a way on which size was not seen to matter."""

VISIT_SECONDS = 2.0
"""Steps of a plan are measured for about so long at a time."""

FEWEST_STEPS, MOST_STEPS = 2, 8
MOVES = 2

ROUNDS = 2
"""Each plan is visited so often: a moment of the machine must not decide alone."""


def profile_flow(
    make_flow: Callable[[], Flow],
    batches: Sequence[Batch],
    *,
    lanes: str | Sequence[LaneSpec] | LanePool,
    budget_seconds: float = BUDGET_SECONDS,
    key: Mapping[str, Mapping[str, object]] | None = None,
    note: Callable[[str], None] | None = None,
) -> Profile:
    """Run steps of a flow under a few plans, and return the profile that explains them.

    Args:
        make_flow: makes the flow with workers that may be thrown away.
        batches: source items of the first steps, as many in each; they are used again and again.
        lanes: lanes of this machine, as `cpu:2`, or spelled out; or a pool of lanes that are up,
            which stays up. Lanes are started, and ended, otherwise.
        budget_seconds: for all of it, the start of lanes included. Each plan that is begun is
            carried through, and the first one is always begun.
        key: what the profile depends on.
        note: told what is going on.

    Raises:
        UserError: there is no batch, or the flow, the lanes or the batches are wrong.
        RunFailed: a step failed.
    """
    from m2flow.plan.profile.learning import fitted  # with numpy, which planning does without

    started = time.monotonic()
    if not batches:
        raise UserError("a flow is measured on batches, and there is none", key="batches")
    flow = make_flow()
    graph, isolated = flow.trace(), isolated_workers(flow)
    specs = specs_of(lanes)
    plans = trial_plans(graph, specs, len(batches[0]), isolated=isolated, workers=flow.workers)
    with _pool(lanes, plans[0], flow) as pool:
        links = _links(pool)
        session = Session(graph, pool, make_flow, batches, plans, started + budget_seconds)
        for account in session.run():
            if note is not None:
                note(account)
        return fitted(session.evidence, key=key, links=links)


def _pool(
    lanes: str | Sequence[LaneSpec] | LanePool, plan: Plan, flow: Flow
) -> AbstractContextManager[LanePool]:
    """Return the given lanes, left up; or those of a plan, started for this."""
    from m2flow.runtime.driver.pool import LanePool

    if isinstance(lanes, LanePool):
        return nullcontext(lanes)
    return LanePool(plan.lanes, isolation_of(flow))


def _links(pool: LanePool) -> dict[str, LinkCost]:
    """Return what the ways between the pool's lanes take, by place."""
    found, table = {}, ASSUMED.merged(pool.measure_links())
    for scope in ("node", "cluster"):
        cost = table.taken(scope, MESSAGE_BYTES)
        if cost is not None:
            rate = cost.bytes_per_second or FASTEST
            found[scope] = LinkCost(Seconds(cost.latency_seconds), BytesPerSecond(rate))
    return found


class Session:
    """Visits to plans on one pool of lanes.

    Args:
        graph: of the steps.
        pool: the lanes.
        make_flow, batches: as for `profile_flow`.
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
        self._moved: set[tuple[str, str]] = set()

    def run(self) -> Iterator[str]:
        """Visit each plan in turn, for which there is time, and yield an account of it in words.

        The first plan is visited in any case.
        """
        usual = 0.0
        for turn in range(ROUNDS):
            for plan in self.plans:
                left = self.deadline - time.monotonic()
                if self.visits and left < usual:
                    return
                started = time.monotonic()
                self._visit(plan, max(0.0, left), gauges=turn == 0)
                usual = max(usual, time.monotonic() - started)
                self.visits += 1
                total, left = ROUNDS * len(self.plans), self.deadline - time.monotonic()
                yield f"{self.visits} of {total} visits to plans, {max(0.0, left):.0f} s left"

    def _visit(self, plan: Plan, left: float, *, gauges: bool) -> None:
        """Bring fresh workers up under a plan, warm them up, and run a few steps."""
        num_items = len(self.batches[0])
        with run_on(self.make_flow(), num_items, plan, self.pool) as run:
            forever = cycle(self.batches)
            loaded = time.monotonic()
            first = list(run.steps(islice(forever, 1)))
            seconds = max(time.monotonic() - loaded, 1e-6)
            wanted = max(FEWEST_STEPS, min(MOST_STEPS, math.ceil(VISIT_SECONDS / seconds)))
            share = left / max(1, ROUNDS * len(self.plans) - self.visits)
            results = list(run.steps(islice(forever, min(wanted, int(share / seconds)))))
            self.evidence.add(
                run.plan,
                results or first,
                warm=bool(results),
                moves=self._moves(run),
                gauged=self._gauge(run) if results and gauges else (),
            )

    def _moves(self, run: Run) -> list[tuple[str, str, float]]:
        """Put workers' states away and bring them back, on lanes that have room for all of them.

        Each worker once for each of its layouts. A call that does nothing is subtracted: what is
        left is the lanes' own time.
        """
        if any(lane.memory_bytes is not None for lane in run.plan.lanes):
            return []  # the steps themselves have shown moves
        moves = []
        for worker in _stateful(run):
            layout = worker, run.plan.placements[worker].layout
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

    def _gauge(self, run: Run) -> tuple[Span, ...]:
        """Return the spans of a step in which lanes say what calls take of memory.

        Before it each state comes back from being away, without what it only keeps for speed, such
        as the room for keys and values of earlier calls.
        """
        if all(lane.memory_bytes is None for lane in run.plan.lanes):
            for worker in _stateful(run):
                for what in ("offload", "onload"):
                    run.worker_call_everywhere(worker, what)
        self._have_gauged(on=True)
        try:
            return tuple(run.step(self.batches[self.visits % len(self.batches)]).spans)
        finally:
            self._have_gauged(on=False)

    def _have_gauged(self, *, on: bool) -> None:
        from m2flow.runtime.lane.orders import GaugeMemory

        for lane in self.pool.lanes:
            self.pool.send(lane.id, GaugeMemory(on))


def _stateful(run: Run) -> list[str]:
    """Name the workers of a run's plan, without pure functions."""
    functions = {node.worker for node in run.graph.nodes if node.is_function}
    return sorted(run.plan.placements.keys() - functions)


def _timed(run: Run, worker: str, method: str) -> float:
    start = time.perf_counter()
    run.worker_call_everywhere(worker, method)
    return time.perf_counter() - start
