"""`RayCarrier`: carries out the engine's commands on the lanes of a pool.

It keeps the source items of the steps in flight, those that are recalled, and what lanes are to
let go of with their next order; its `Publisher` keeps where weights are. Where payloads are the
commands say. Payloads go from lane to lane; only what is kept here and what a step returns do not.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol, get_args

from ray import cloudpickle

from m2flow.engine.messages import (
    LAUNCHER,
    AbortCall,
    CallAborted,
    CallFailed,
    CallFinished,
    Command,
    CompleteStep,
    ExportWeights,
    FeedCall,
    InstallWeights,
    LaneCommand,
    LaneLost,
    LaneReport,
    MoveState,
    ReleaseItems,
    RunCall,
    RunFinish,
)
from m2flow.engine.plan import Plan, StagePlan
from m2flow.flow.batch import Batch
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode
from m2flow.flow.worker import Worker
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.loading import Moved, load_workers
from m2flow.runtime.driver.methods import STEP
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import State
from m2flow.runtime.lane.exchange import ItemsKey
from m2flow.runtime.lane.host import joined_exits, share_of
from m2flow.runtime.lane.journal import JournalPlace
from m2flow.runtime.lane.orders import (
    CallMethod,
    DropStep,
    Execute,
    FromLane,
    KeepRollouts,
    LaneEnded,
    MethodResult,
    Probe,
    Release,
    Reports,
)
from m2flow.runtime.lane.reports import Report
from m2flow.runtime.transport.listening import SILENT_SECONDS
from m2flow.runtime.transport.peering import PeerLost
from m2flow.runtime.weights.publisher import Publisher

REPORTED = get_args(LaneReport)

PEER_SECONDS = 1.0
"""How long to wait for the first cause, when a lane fails as it does when another one has. Where a
machine is silent its peers may notice sooner than the launcher, by all that either takes."""


class Healing(Protocol):
    """Brings lost lanes back while the steps go on; see `Mender`."""

    epochs: dict[int, int]

    @property
    def busy(self) -> bool: ...

    def ended(self, lane: int, reason: str) -> LaneLost | None: ...

    def instead_of(self, failed: CallFailed) -> CallFailed | LaneLost: ...

    def takes(self, lane: int, message: FromLane) -> bool: ...

    def news(self) -> list[Report]: ...


class RayCarrier:
    """Carries out commands on lanes that are up.

    Args:
        pool: the lanes.
        graphs: the flow's traced methods by name.
        plan: gives the placement of all workers.
        workers: the flow's workers; each lane gets copies of those placed on it.
        plans: the plan of each of the graphs.
        version: number of the weights that the run begins with.
        load_seconds: longest that a lane may take to bring one worker up.
        moved: what is known of the run that this one goes on with on the same lanes, if any.
        states: what workers are to restore, where the launcher keeps it.
        run: whose the lanes are; None for one that begins with these workers.

    Attributes:
        state_bytes: what each worker's state takes on a lane, as the workers say after loading.
        mender: who brings lost lanes back while the steps go on; None where nobody does.

    Raises:
        Exception: what a worker raised while it was loaded.
    """

    def __init__(
        self,
        pool: LanePool,
        graphs: Mapping[str, FlowGraph],
        plan: Plan,
        workers: Mapping[str, Worker],
        plans: Mapping[str, Plan],
        version: int,
        load_seconds: float,
        moved: Moved | None = None,
        states: Mapping[str, State] = MappingProxyType({}),
        run: object | None = None,
    ) -> None:
        self.pool, self.graphs, self.plan, self._plans = pool, graphs, plan, plans
        self._sources: dict[tuple[str, int], dict[int, Batch]] = {}
        self._released: dict[int, list[Release]] = {lane.id: [] for lane in pool.lanes}
        self._gang_calls: dict[int, set[int]] = {}  # the lanes of each that are at it
        self._keeping: KeepRollouts | None = None
        self.mender: Healing | None = None
        self._collective = {name for name, worker in workers.items() if worker.collective}
        self.publisher = Publisher(pool.same_node, plan, graphs, pool.exchange.link)
        self.state_bytes = load_workers(
            pool, graphs, plan, workers, version, load_seconds, moved, states, run
        )

    # --- carrier ----------------------------------------------------------------------------------

    def submit(
        self,
        flow: str,
        step: int,
        batch: Batch,
        recalled: Mapping[int, Batch] = MappingProxyType({}),
    ) -> None:
        self._sources[flow, step] = {SOURCE: batch, **recalled}

    def keep_rollouts(self, journal: Journal) -> None:
        """Have all lanes keep rollouts on disk."""
        share = journal.max_bytes // len(self.pool.lanes)
        self._keeping = KeepRollouts(JournalPlace(STEP, str(journal.folder), share))
        for spec in self.pool.lanes:
            self.pool.send(spec.id, self._keeping)

    def greet(self, lane: int) -> None:
        """Tell a lane that has come back what all others were told."""
        if self._keeping is not None:
            self.pool.send(lane, self._keeping)

    def forget(self, lane: int) -> None:
        """A lane is gone, and comes back with nothing on it."""
        self._released[lane] = []
        self.publisher.lost(lane)
        self.pool.exchange.forget(lane)

    def carry_out(self, flow: str, command: Command) -> None:
        match command:
            case RunCall(node=index, lanes=lanes):
                node = self.graphs[flow].nodes[index]
                if len(lanes) > 1:
                    self._gang_calls[command.call] = set(lanes)
                for lane in lanes:
                    sources = self._held_here(flow, command, lane)
                    in_pieces = command.fused or self._wanted_early(flow, node, lane)
                    self._send(lane, flow, command, sources=sources, in_pieces=in_pieces)
            case FeedCall(lanes=lanes):
                for lane in lanes:
                    self._send(lane, flow, command, sources=self._held_here(flow, command, lane))
            case RunFinish(lanes=lanes):
                if len(lanes) > 1:
                    self._gang_calls[command.call] = set(lanes)
                for lane in lanes:
                    self._send(lane, flow, command)
            case AbortCall(lanes=lanes):
                for lane in lanes:
                    self._send(lane, flow, command)
            case ExportWeights(source=worker, version=version, lanes=lanes):
                for lane, sends in self.publisher.export(worker, version, lanes).items():
                    self._send(lane, flow, command, sends=sends)
            case InstallWeights(lanes=(lane,), local=local):
                exports = [] if local else self.publisher.install(command)
                self._send(lane, flow, command, exports=exports)
            case MoveState(lane=lane):
                self.pool.send(lane, Execute(flow, command), hold=True)
            case ReleaseItems(step=step, producer=producer, items=items, lanes=lanes):
                for lane in lanes:
                    self._released[lane].append(Release(flow, step, producer, items))
            case _:
                raise AssertionError(f"no lane carries out {command}")

    def _send(self, lane: int, flow: str, command: LaneCommand, **more: Any) -> None:
        """Give a lane an order; with it goes what the lane is to let go of before."""
        released, self._released[lane] = self._released[lane], []
        self.pool.send(lane, Execute(flow, command, released=released, **more))

    def _held_here(self, flow: str, command: RunCall | FeedCall, lane: int) -> list[Any]:
        """What a call reads on a lane that the launcher holds, packed, part by part."""
        worker = self.graphs[flow].nodes[command.node].worker
        inputs = share_of(command, lane, collective=worker in self._collective)
        sources, same_node = self._sources[flow, command.step], self.pool.is_here(lane)
        return [
            self.pool.exchange.wrap(
                sources[part.producer].take(part.items), lane, same_node=same_node
            )
            for parts in inputs
            for part in parts
            if part.lane == LAUNCHER and part.items
        ]

    def _wanted_early(self, flow: str, node: StageNode, lane: int) -> bool:
        """Whether anybody can use a call's first items before its last: another lane, or the
        engine, which feeds the call by what it has finished."""
        if not node.streaming:
            return False
        if self._plans[flow].stages.get(node.name, StagePlan()).max_running is not None:
            return True
        readers = [other for other in self.graphs[flow].nodes if node.index in other.inputs]
        return any(self.plan.placements[other.worker].lanes != (lane,) for other in readers)

    # --- what lanes report ------------------------------------------------------------------------

    def wait(self, seconds: float) -> list[Report]:
        """Reports of the lanes that have answered; waits for the first one, but no longer."""
        reports = self._taken(self.pool.receive(seconds))
        if any(self._may_be_an_echo(report) for report in reports):
            deadline = time.monotonic() + PEER_SECONDS
            if self._misses_a_peer_elsewhere(reports):
                deadline += SILENT_SECONDS
            while (left := deadline - time.monotonic()) > 0:
                if any(isinstance(report.event, LaneLost) for report in reports):
                    break
                reports += self._taken(self.pool.receive(left))
        if self.mender is not None and self.mender.busy:
            reports += self.mender.news()
        return first_cause_first(reports)

    def _taken(self, said: Sequence[tuple[int, FromLane]]) -> list[Report]:
        """The reports among what lanes have said; where weights were laid out is noted."""
        reports: list[Report] = []
        for lane, message in said:
            if isinstance(message, LaneEnded):
                reports += self._lane_ended(lane, message.reason)
            elif self.mender is not None and self.mender.takes(lane, message):
                pass
            elif isinstance(message, Reports):
                if message.exports:
                    self.publisher.laid_out(message.exports)
                for report in message.reports:
                    if isinstance(report.event, CallFinished):
                        self.publisher.finished(report.event.call)
                    if isinstance(report.event, CallFinished | CallAborted):
                        self._has_left_gang(report.event.call, lane)
                reports += self._as_heard(lane, message.reports)
        return reports

    def _has_left_gang(self, call: int, lane: int) -> None:
        """A lane has done its part of a call, or withdrawn from it."""
        at_it = self._gang_calls.get(call, set())
        at_it.discard(lane)
        if not at_it:
            self._gang_calls.pop(call, None)

    def _lane_ended(self, lane: int, reason: str) -> list[Report]:
        self.pool.exchange.forget(lane)
        reason = self._end_of(lane, reason)
        if self.mender is None:
            return [Report(LaneLost(lane, reason))]
        lost = self.mender.ended(lane, reason)
        return [] if lost is None else [Report(lost)]

    def _as_heard(self, lane: int, reports: Sequence[Report]) -> Sequence[Report]:
        """Reports of a lane, with the epoch of its process; it knows of none."""
        if self.mender is None:
            return reports
        heard, epoch = [], self.mender.epochs.get(lane, 0)
        for report in reports:
            event = report.event
            if isinstance(event, CallFailed):
                event = self.mender.instead_of(event)
            if epoch and isinstance(event, REPORTED):
                event = replace(event, epoch=epoch)
            heard.append(report if event is report.event else replace(report, event=event))
        return heard

    def _may_be_an_echo(self, report: Report) -> bool:
        """Whether a call has failed as it does when another lane has failed, or is gone.

        While a lane is on its way back it is missed, and the engine knows of it.
        """
        event = report.event
        if not isinstance(event, CallFailed):
            return False
        if isinstance(event.error, PeerLost):
            return self.mender is None or not self.mender.busy
        return event.call in self._gang_calls

    def _misses_a_peer_elsewhere(self, reports: Sequence[Report]) -> bool:
        """Whether a peer is missed, which may be on another machine."""
        if all(self.pool.is_here(lane.id) for lane in self.pool.lanes):
            return False
        events = [report.event for report in reports]
        return any(isinstance(x, CallFailed) and isinstance(x.error, PeerLost) for x in events)

    def _end_of(self, lane: int, reason: str) -> str:
        spots = self.plan.placements.items()
        there = ", ".join(worker for worker, spot in spots if lane in spot.lanes)
        return f"{reason} (it held {there or 'nothing'})"

    def collect(self, flow: str, command: CompleteStep) -> Future[Batch]:
        """The items that the step returned; then every lane lets the step's payloads go."""
        step = command.step
        sources = self._sources.pop((flow, step))
        for lane, released in self._released.items():
            self._released[lane] = [r for r in released if (r.flow, r.step) != (flow, step)]
        pieces = [
            _there(sources[part.producer].take(part.items))
            if part.lane == LAUNCHER
            else self.pool.exchange.fetch_later(
                part.lane,
                ItemsKey(flow, step, part.producer, part.items),
                self.plan.deadline_seconds,
            )
            for part in command.output
        ]
        return _when_all(pieces, lambda: self._joined(flow, step, pieces), self.pool.wake)

    def _joined(self, flow: str, step: int, pieces: Sequence[Future[Batch]]) -> Batch:
        graph = self.graphs[flow]
        joined = joined_exits(
            graph, graph.output_nodes, lambda: Batch.concat([piece.result() for piece in pieces])
        )
        return joined.select(sorted(range(len(joined)), key=joined.ids.__getitem__))

    def drop(self, flow: str, step: int) -> None:
        """What a step returned was collected: every lane lets the step's payloads go."""
        for spec in self.pool.lanes:
            self.pool.send(spec.id, DropStep(flow, step))

    def take_back(
        self, flow: str, steps: Iterable[int], calls: Iterable[AbortCall], seconds: float
    ) -> None:
        """Stop calls, wait until all lanes are quiet, and let go of what steps have made.

        Raises:
            RunFailed: a lane is not quiet after `seconds`, or was lost.
        """
        for call in calls:
            self.carry_out(flow, call)
        lanes = [lane.id for lane in self.pool.lanes]
        self.pool.ask_all(dict.fromkeys(lanes, lambda number: Probe(number, ())), seconds)
        while said := self.pool.receive(0.0):  # their last words of the steps
            self._taken(said)
        for step in steps:
            del self._sources[flow, step]
            self.drop(flow, step)

    # --- beside the steps -------------------------------------------------------------------------

    def worker_call(self, worker: str, method: str, *args: Any) -> Any:
        """Call a method of a worker on its first lane; the answer."""
        return self._ask(self.plan.placements[worker].lanes[:1], worker, method, args)[0]

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """Call a method of a worker on all of its lanes; the answers in order of rank."""
        return self._ask(self.plan.placements[worker].lanes, worker, method, args)

    def _ask(
        self, lanes: Sequence[int], worker: str, method: str, args: tuple[Any, ...]
    ) -> list[Any]:
        arguments = cloudpickle.dumps(args)
        answers = self.pool.ask_all(
            dict.fromkeys(lanes, lambda number: CallMethod(number, worker, method, arguments)),
            self.plan.deadline_seconds,
        )
        return [_value(answers[lane]) for lane in lanes]

    def close(self) -> None:
        """Nothing: the workers end with the pool, or make way for those of the next run."""


def first_cause_first(reports: Sequence[Report]) -> list[Report]:
    """Order reports so that the first cause of a failure is heard first.

    A lane that was lost comes before what others missed of it; of calls that failed, the one that
    failed first in time does: its peers fail in a collective that it has left. What lanes reported
    before keeps its order.
    """

    def rank(report: Report) -> tuple[int, float]:
        match report.event:
            case LaneLost():
                return 1, report.at
            case CallFailed():
                return 2, report.at
        return 0, 0.0

    return sorted(reports, key=rank)


def _when_all(
    pieces: Sequence[Future[Batch]], join: Callable[[], Batch], then: Callable[[], None]
) -> Future[Batch]:
    """A future of what `join` makes once all pieces are there; `then` is called after it."""
    joined: Future[Batch] = Future()
    left, lock = set(pieces), Lock()

    def one_is_there(piece: Future[Batch]) -> None:
        with lock:
            left.discard(piece)
            if left:
                return
        try:
            joined.set_result(join())
        except BaseException as error:  # noqa: BLE001 - raised by the future
            joined.set_exception(error)
        then()

    for piece in pieces:
        piece.add_done_callback(one_is_there)
    return joined


def _there(batch: Batch) -> Future[Batch]:
    """A future of what is there."""
    done: Future[Batch] = Future()
    done.set_result(batch)
    return done


def _value(answer: MethodResult) -> Any:
    value = pickle.loads(answer.value)
    if answer.raised:
        raise value
    return value
