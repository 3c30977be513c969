"""Bringing a flow's workers up on the lanes of a pool: the launcher's side."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ray import cloudpickle

from m2flow.engine.plan import Plan
from m2flow.errors import RunFailed, Stalled, UserError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Worker, grid_of
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import State
from m2flow.runtime.lane.orders import (
    Fetch,
    LaneEnded,
    Load,
    Loaded,
    Loading,
    Placed,
    Rendezvous,
)
from m2flow.runtime.transport.groups import STORE, check_private, lane_sets_of
from m2flow.runtime.transport.peering import PeerLost
from m2flow.runtime.transport.wire import culprit

SETTLE_SECONDS = 5.0
"""How long to wait for lanes that are still loading when another one has failed to."""


@dataclass(frozen=True)
class Moved:
    """What becomes of the workers of a run that goes on under another plan.

    Attributes:
        kept: workers that stand where they stood, and stay as they are.
        states: where the states of others lie.
    """

    kept: frozenset[str]
    states: Mapping[str, Fetch]


def load_workers(
    pool: LanePool,
    graphs: Mapping[str, FlowGraph],
    plan: Plan,
    workers: Mapping[str, Worker],
    version: int,
    seconds: float,
    moved: Moved | None = None,
    states: Mapping[str, State] = MappingProxyType({}),
    run: object | None = None,
) -> dict[str, int]:
    """Bring workers up on their lanes; the most that each one's state takes on one.

    Args:
        pool: the lanes.
        graphs: the flow's traced methods by name.
        plan: gives the placement of all workers.
        workers: the flow's workers; each lane gets copies of those placed on it.
        version: number of the weights that the run begins with.
        seconds: longest that a lane may take to bring one worker up.
        moved: what is known of the run that goes on on the same lanes, if any.
        states: what workers are to restore, where the launcher keeps it.
        run: whose the lanes are; None for one that begins with these workers.

    Raises:
        UserError: a worker cannot be pickled.
        RunFailed: a lane made no progress for so long, or was lost.
        Exception: what a worker raised while it was loaded, the first one in time.
    """
    order = LoadOrder(pool, graphs, plan, workers, version)
    meeting = _rendezvous(pool, plan, order) if order.lane_sets else None
    pool.uses_groups = meeting is not None
    if meeting is not None:
        if meeting.number != pool.num_worlds:
            pool.keeper = meeting.keeper
        pool.world, pool.num_worlds = meeting.world, meeting.number
    pool.run = run  # from here on whatever other run there was has lost its workers
    for lane in pool.lanes:
        pool.send(lane.id, order.of(lane.id, meeting, moved, states))
    return _loaded(pool, order.number, seconds)


class LoadOrder:
    """What lanes are told to load.

    Args:
        pool, graphs, plan, workers, version: as of `load_workers`.

    Attributes:
        number: of the lanes' answers.
        lane_sets: positions of lanes that need a process group, set by set.
    """

    def __init__(
        self,
        pool: LanePool,
        graphs: Mapping[str, FlowGraph],
        plan: Plan,
        workers: Mapping[str, Worker],
        version: int,
    ) -> None:
        self._pool, self._plan, self._version = pool, plan, version
        self._spots = {name: spot for name, spot in plan.placements.items() if name in workers}
        self._sums = summing(graphs.values())
        self._gangs = {
            name: [pool.positions(gang) for gang in spot.replicas]
            for name, spot in self._spots.items()
        }
        self.lane_sets = {
            lanes
            for name, replicas in self._gangs.items()
            for lanes in lane_sets_of(
                replicas, grid_of(self._spots[name].layout), sums=name in self._sums
            )
        }
        self._sent = {
            name: _pickled(workers[name], name, "make it in `load`") for name in self._spots
        }
        self._flow = _pickled_graphs(graphs)
        self._here: dict[str, State] = {}
        self.number = pool.new_number()

    def of(
        self,
        lane: int,
        meeting: Rendezvous | None = None,
        moved: Moved | None = None,
        states: Mapping[str, State] = MappingProxyType({}),
    ) -> Load:
        """The order for one lane."""
        pool, memory = self._pool, {one.id: one.memory_bytes for one in self._plan.lanes}
        placed = {
            name: Placed(
                self._sent[name],
                tuple(self._gangs[name]),
                pool.positions(spot.lanes),
                spot.layout,
                name in self._sums and len(spot.lanes) > 1,
                None if moved is None else moved.states.get(name),
                self._wrapped(name, states[name], lane) if name in states else None,
            )
            for name, spot in self._spots.items()
            if lane in spot.lanes
        }
        return Load(
            self.number,
            self._flow,
            placed,
            self._version,
            memory.get(lane),
            self._plan.deadline_seconds,
            meeting,
            tuple(sorted(self.lane_sets)),
            None if moved is None else tuple(set(placed) & moved.kept),
        )

    def _wrapped(self, name: str, state: State, lane: int) -> Any:
        """A worker's state on its way to a lane. All lanes of this machine read one copy of it."""
        exchange, here = self._pool.exchange, self._pool.is_here(lane)
        if here and name not in self._here:
            self._here[name] = exchange.shared(state)
        state = self._here[name] if here else state
        return exchange.wrap(Batch({"state": [state]}), lane, same_node=here)


def _pickled(value: object, name: str, hint: str) -> bytes:
    """A worker or a function of the flow, pickled.

    Raises:
        UserError: a part of it cannot be pickled; names that part.
    """
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        where, kind, why = culprit(value, name) or (name, type(value).__name__, str(error))
        raise UserError(
            f"a lane gets a pickled copy, and this {kind} cannot be pickled: {why}",
            key=where,
            hint=hint,
        ) from error


def _pickled_graphs(graphs: Mapping[str, FlowGraph]) -> bytes:
    """The flow's methods, with the functions that are stages.

    Raises:
        UserError: a function holds what cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(dict(graphs)))
    except Exception:
        for graph in graphs.values():
            for name, stage in graph.functions.items():
                _pickled(stage.function, name, "make it in a worker's `load`")
        raise


def summing(graphs: Iterable[FlowGraph]) -> set[str]:
    """Workers that may sum over their lanes: those with a `finish`, which runs on all of them."""
    return {node.worker for graph in graphs for node in graph.nodes if node.has_finish}


def _rendezvous(pool: LanePool, plan: Plan, order: LoadOrder) -> Rendezvous:
    """How all lanes meet. A lane that is new to their world keeps the store: its port is free.

    If possible it is one that all are lost with: of a process group.
    """
    grouped = {position for lanes in order.lane_sets for position in lanes}
    new = [lane for lane in pool.lanes if pool.positions([lane.id])[0] not in pool.world]
    keeper = min(new or pool.lanes, key=lambda x: pool.positions([x.id])[0] not in grouped).id
    at, (position,) = pool.addresses[keeper], pool.positions([keeper])
    store: str | tuple[str, int] = f"{STORE}{order.number}"
    if at.meeting_port is not None:
        for host in {pool.addresses[lane.id].host for lane in pool.lanes}:
            check_private(host)
        store = (at.host, at.meeting_port)
    return Rendezvous(
        pool.num_worlds + bool(new),
        store,
        plan.deadline_seconds,
        pool.all_positions,
        position,
    )


def _loaded(pool: LanePool, number: int, seconds: float) -> dict[str, int]:
    """Wait until all lanes have loaded. Each worker that one begins with is a sign of progress.

    When a lane has failed, the others are waited for a little: the workers of the next run are not
    to come up beside theirs. Lanes that wait for the one that has failed spoil the pool.
    """
    heard = {lane.id: time.monotonic() for lane in pool.lanes}
    busy_with: dict[int, str] = {}
    state_bytes: dict[str, int] = {}
    errors: list[tuple[float, bytes]] = []
    settled_by = math.inf
    while heard:
        left = min(min(heard.values()) + seconds, settled_by) - time.monotonic()
        if left <= 0:
            waiting = ", ".join(f"lane {x} ({busy_with.get(x, 'begins')})" for x in sorted(heard))
            what = f"no progress with loading for {seconds:g} s: {waiting}"
            pool.spoil(f"a run failed while it loaded: {waiting}" if errors else what)
            if errors:
                break
            raise RunFailed(what) from Stalled(what)
        for lane, message in pool.receive(left):
            match message:
                case Loading(worker=worker) if message.number == number:
                    heard[lane], busy_with[lane] = time.monotonic(), worker
                case Loaded() if message.number == number:
                    heard.pop(lane, None)
                    for name, size in message.state_bytes.items():
                        state_bytes[name] = max(size, state_bytes.get(name, 0))
                    if message.error is not None:
                        errors.append((message.at, message.error))
                        settled_by = min(settled_by, time.monotonic() + SETTLE_SECONDS)
                case LaneEnded(reason=reason):
                    raise RunFailed(f"lane {lane} was lost while it loaded: {reason}")
                case _:  # the last words of an earlier run
                    pass
    if errors:
        error = pickle.loads(min(errors)[1])
        if isinstance(error, PeerLost):  # of the lane that was lost is not heard yet
            raise RunFailed(f"workers were not loaded: {error}") from error
        raise error
    return state_bytes
