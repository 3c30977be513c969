"""A lane as a Ray actor: one process that owns one accelerator, or a fixed set of CPU cores.

Calls run on one thread, in the order in which they were sent; feeding, releasing and handing
payloads to other lanes happen beside them, on threads of their own. Torch is not imported before
the lane has bound itself to its cores and set its thread count.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ray
from ray import cloudpickle

from m2flow.engine.host import LaneHost, Produced
from m2flow.engine.inline import call_span
from m2flow.engine.messages import (
    CallFailed,
    CallFinished,
    ExportWeights,
    FeedCall,
    InstallWeights,
    ItemsProduced,
    MoveState,
    RunCall,
    RunFinish,
)
from m2flow.engine.plan import LaneSpec
from m2flow.engine.runner import Report
from m2flow.engine.spans import Span
from m2flow.errors import RunFailed
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Place, Worker


@dataclass(frozen=True, slots=True)
class Fetch:
    """Payloads a call needs that are not on its lane.

    Attributes:
        step, producer: whose output they are.
        items: which.
        lane: handle of the lane that holds them; None if `batch` carries them.
        batch: the payload itself (source items).
    """

    step: int
    producer: int
    items: tuple[int, ...]
    lane: Any = None
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class Meeting:
    """How lanes find each other for collectives; see `LaneGroups`."""

    lane_index: int
    num_lanes: int
    address: str
    lane_sets: tuple[tuple[int, ...], ...]
    same_node: bool
    timeout_seconds: float


Released: TypeAlias = Sequence[tuple[int, Sequence[int]]]


class LaneProcess:
    """The actor. Every method that runs a command returns Reports, and never raises for a stage."""

    def __init__(self, lane: LaneSpec) -> None:
        self.lane = lane
        self.num_threads = max(1, len(lane.cores))
        os.environ["OMP_NUM_THREADS"] = str(self.num_threads)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._bound = False
        self._groups: Any = None
        self._host: LaneHost | None = None

    def ready(self) -> str:
        """The address of this lane's node, and a sign of life."""
        self._bind()
        return str(ray.util.get_node_ip_address())

    def _bind(self) -> None:
        """Bind the calling thread, and every thread that it starts, to the lane's cores."""
        if self._bound or not self.lane.cores:
            return
        there = os.sched_getaffinity(0)
        if set(self.lane.cores) <= there:
            os.sched_setaffinity(0, self.lane.cores)
        self._bound = True

    def free_port(self) -> int:
        from m2flow.runtime.groups import free_port

        return free_port()

    def load(
        self, graphs: Mapping[str, FlowGraph], placed: bytes, meeting: Meeting | None, version: int
    ) -> int:
        """Bring up this lane's workers; returns the process id.

        Args:
            graphs: the flow's traced methods.
            placed: pickled mapping of worker name to (worker, lanes, rank of this lane).
            meeting: None when no worker stands on two lanes.
            version: number of the weights that the run begins with.
        """
        self._bind()
        import torch

        from m2flow.runtime.serialization import register_tensors

        torch.set_num_threads(self.num_threads)
        register_tensors()
        if meeting is not None:
            from m2flow.runtime.groups import LaneGroups

            self._groups = LaneGroups(
                meeting.lane_index,
                meeting.num_lanes,
                meeting.address,
                meeting.lane_sets,
                same_node=meeting.same_node,
                timeout_seconds=meeting.timeout_seconds,
            )
        device = "cpu" if self.lane.gpu is None else "cuda:0"
        workers: dict[str, Worker] = {}
        for name, (worker, lanes, rank) in pickle.loads(placed).items():
            place = Place(self.lane.id, rank, len(lanes), device, self.num_threads, version)
            if len(lanes) > 1:
                place = replace(place, all_reduce=self._groups.all_reduce(lanes))
            worker.load(place)
            workers[name] = worker
        self._host = LaneHost(self.lane.id, graphs, workers)
        return os.getpid()

    @property
    def host(self) -> LaneHost:
        assert self._host is not None, "the lane has not been loaded"
        return self._host

    # --- commands, in order ---------------------------------------------------------------------

    def call(
        self, flow: str, command: RunCall, fetches: Sequence[Fetch], released: Released
    ) -> list[Report]:
        """Run a stage; all reports when it has ended."""
        return list(self.stream(flow, command, fetches, released))

    def stream(
        self, flow: str, command: RunCall, fetches: Sequence[Fetch], released: Released
    ) -> Iterator[Report]:
        """Run a stage; a report for every piece that is finished, then one for the end.

        Args:
            flow, command: what to run.
            fetches: payloads to bring to this lane first.
            released: (producer, items) of this step that nobody needs any more.
        """
        for producer, items in released:
            self.host.store.release(flow, command.step, producer, items)
        self._bind()
        try:
            yield from self._fetch(flow, fetches)
            start = time.time()
            for produced in self.host.call(flow, command):
                yield Report(self._produced(command.call, produced))
            yield self._finished(flow, command, start)
        except BaseException as error:
            yield self._failed(command.call, error)

    def finish(self, flow: str, command: RunFinish) -> list[Report]:
        """Run the `finish` of an accumulating stage; the gang's first lane gives the metrics."""
        try:
            start = time.time()
            metrics = self.host.finish(flow, command)
            first = command.lanes[0] == self.lane.id
            return [self._finished(flow, command, start, metrics if first else None)]
        except BaseException as error:
            return [self._failed(command.call, error)]

    def export_weights(
        self, flow: str, command: ExportWeights
    ) -> tuple[list[Report], dict[str, Any]]:
        """A worker's weights, and the report."""
        try:
            start = time.time()
            weights = dict(self.host.workers[command.source].weights())
            return [self._finished(flow, command, start)], weights
        except BaseException as error:
            return [self._failed(command.call, error)], {}

    def install_weights(
        self, flow: str, command: InstallWeights, weights: Mapping[str, Any] | None
    ) -> list[Report]:
        """Install weights: those given, or those of the source worker on this lane."""
        try:
            start = time.time()
            if weights is None:
                weights = self.host.workers[command.source].weights()
            self.host.install(command.source, command.target, command.version, weights)
            return [self._finished(flow, command, start)]
        except BaseException as error:
            return [self._failed(command.call, error)]

    def move(self, command: MoveState) -> list[Report]:
        """Offload or onload a worker."""
        start = time.time()
        self.host.move(command)
        return [Report(None, (Span(self.lane.id, command.worker, "switch", start, time.time()),))]

    def worker_call(self, worker: str, method: str, *args: Any) -> Any:
        """Call a method of a worker that is not a stage, such as `save`."""
        self._bind()
        return getattr(self.host.workers[worker], method)(*args)

    def shut_down(self) -> None:
        """Close the workers and leave the process groups."""
        if self._host is not None:
            for worker in self._host.workers.values():
                worker.close()
        if self._groups is not None:
            self._groups.close()

    def release_in_turn(self, flow: str, step: int, producer: int, items: Sequence[int]) -> None:
        """Let payloads of a loop go before a later call makes the same items anew."""
        self.host.store.release(flow, step, producer, items)

    # --- beside the commands ----------------------------------------------------------------------

    @ray.method(concurrency_group="items")
    def feed(self, flow: str, command: FeedCall, fetches: Sequence[Fetch]) -> None:
        """Hand more items to a streaming call; one that has ended leaves them to the engine."""
        for _ in self._fetch(flow, fetches):
            pass
        self.host.feed(flow, command)

    @ray.method(concurrency_group="items")
    def export_items(self, flow: str, step: int, producer: int, items: Sequence[int]) -> Batch:
        """Payloads for another lane."""
        return self.host.store.gather(flow, step, [(producer, items)])

    @ray.method(concurrency_group="control")
    def drop_step(self, flow: str, step: int) -> None:
        self.host.store.drop_step(flow, step)

    # --- reports ----------------------------------------------------------------------------------

    def _fetch(self, flow: str, fetches: Sequence[Fetch]) -> Iterator[Report]:
        """Bring payloads to this lane."""
        if not fetches:
            return
        start = time.time()
        asked = [
            (fetch, fetch.lane.export_items.remote(flow, fetch.step, fetch.producer, fetch.items))
            for fetch in fetches
            if fetch.batch is None
        ]
        for fetch in fetches:
            if fetch.batch is not None:
                self.host.store.put(flow, fetch.step, fetch.producer, fetch.batch)
        if not asked:
            return
        for fetch, reference in asked:
            self.host.store.put(flow, fetch.step, fetch.producer, ray.get(reference))
        items = sum(len(fetch.items) for fetch, _ in asked)
        span = Span(self.lane.id, "items", "transfer", start, time.time(), {"items": items})
        yield Report(None, (span,))

    def _produced(self, call: int, produced: Produced) -> ItemsProduced:
        return ItemsProduced(call, produced.items, produced.num_bytes, produced.leaving)

    def _finished(
        self,
        flow: str,
        command: RunCall | RunFinish | ExportWeights | InstallWeights,
        start: float,
        metrics: Mapping[str, float] | None = None,
    ) -> Report:
        graph = self.host.graphs[flow]
        span = call_span(graph, command, self.lane.id, start, time.time())
        return Report(CallFinished(command.call, self.lane.id), (span,), metrics)

    def _failed(self, call: int, error: BaseException) -> Report:
        """The error as it was raised, with the lane's traceback as a note."""
        trace = "".join(traceback.format_exception(error))
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # an exception of a library that cannot be pickled: keep its words
            error = RunFailed(f"{type(error).__name__}: {error}")
        error.add_note(f"On lane {self.lane.id}:\n{trace}")
        return Report(CallFailed(call, self.lane.id, error))
