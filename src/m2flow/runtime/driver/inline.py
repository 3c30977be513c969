"""The inline driver: every lane in this process and on this thread, no Ray.

Commands are carried out one after the other, on the very Worker objects the user made, so that
`breakpoint()` inside a stage works and a traceback is the stage's own. A plan with several lanes
runs too, one lane at a time, as long as no worker stands on two of them. A call that stalls ends
the run (`CallWatch`), but not while somebody is in a debugger.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from m2flow.engine.calls import call_name
from m2flow.engine.messages import (
    AbortCall,
    CallCommand,
    Command,
    CompleteStep,
    ExportWeights,
    FeedCall,
    InstallWeights,
    ItemsProduced,
    MoveState,
    ReleaseItems,
    RunCall,
    RunFinish,
)
from m2flow.engine.plan import Plan
from m2flow.errors import PlanError, UserError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import SOURCE, FlowGraph
from m2flow.flow.worker import Place, Worker
from m2flow.runtime.driver.call_watch import CallWatch
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.methods import STEP
from m2flow.runtime.lane.host import LaneHost, joined_exits
from m2flow.runtime.lane.journal import JournalPlace, JournalWriter
from m2flow.runtime.lane.reports import Published, Report


class InlineCarrier:
    """Carries out commands in this process.

    Args:
        graphs: the flow's traced methods by name.
        plan: gives the lanes, the placement of workers and the deadline of calls.
        workers: the flow's workers; `load` is called here.
        num_threads: threads a worker may use. On a lane with a memory limit each worker is
            offloaded as soon as it is loaded: nothing is resident there at the start.
        device: where tensors live.
        version: number of the weights that the run begins with.
        on_close: called when all is closed.

    Attributes:
        state_bytes: what each worker's state takes, as the workers say after loading.
    """

    def __init__(
        self,
        graphs: Mapping[str, FlowGraph],
        plan: Plan,
        workers: Mapping[str, Worker],
        num_threads: int = 1,
        device: str = "cpu",
        version: int = 0,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        for name, placement in plan.placements.items():
            if name in workers and len(placement.lanes) > 1:
                raise PlanError(
                    f"stands on {len(placement.lanes)} lanes, and one process holds one copy of it",
                    key=name,
                    hint="use a plan with one lane, or run it on Ray",
                )
            if any(len(gang) > 1 for gang in placement.replicas):
                raise PlanError(
                    "its lanes share each call, and one process has one of them at a time",
                    key=name,
                    value=placement.replicas,
                    hint="let each replica be a single lane, or run it on Ray",
                )
        self.graphs, self._on_close = graphs, on_close
        self._host = LaneHost(0, graphs, {})
        self._journal: JournalWriter | None = None
        self.state_bytes: dict[str, int] = {}
        self._queue: deque[tuple[str, Command]] = deque()
        self._said: list[Report] = []
        self._streams: deque[tuple[RunCall, str, Iterator[ItemsProduced | None], float]] = deque()
        place = Place(device=device, num_threads=num_threads, version=version)
        limits = {lane.id: lane.memory_bytes for lane in plan.lanes}
        try:
            for name, worker in workers.items():
                if name in plan.placements:
                    lane = plan.placements[name].lanes[0]
                    self._load(name, worker, replace(place, lane=lane, memory_bytes=limits[lane]))
        except BaseException:
            with suppress(Exception):  # what counts is why they were not loaded
                self._close_workers()
            raise
        self._watch = CallWatch(plan.deadline_seconds)

    def _load(self, name: str, worker: Worker, place: Place) -> None:
        worker.place = place  # a `load` need not call that of `Worker`
        worker.load(place)
        self._host.workers = {**self._host.workers, name: worker}
        self._host.versions[name] = place.version
        self.state_bytes[name] = worker.state_bytes()
        if place.memory_bytes is not None:
            worker.offload()

    def submit(
        self,
        flow: str,
        step: int,
        batch: Batch,
        recalled: Mapping[int, Batch] = MappingProxyType({}),
    ) -> None:
        for producer, items in {SOURCE: batch, **recalled}.items():
            self._host.store.put(flow, step, producer, items)

    def keep_rollouts(self, journal: Journal) -> None:
        """Keep rollouts on disk as they are finished."""
        if self._journal is None:
            place = JournalPlace(STEP, str(journal.folder), journal.max_bytes)
            self._journal = JournalWriter(place)
            self._host.keep_rollouts(self._journal)

    def carry_out(self, flow: str, command: Command) -> None:
        if isinstance(command, ReleaseItems):
            self._host.store.release(flow, command.step, command.producer, command.items)
        else:
            self._queue.append((flow, command))

    def wait(self, seconds: float) -> list[Report]:
        """Carry out the next command, or one piece of a streaming call.

        Raises:
            RunFailed: a call has given nothing within its deadline.
        """
        if self._said:
            said, self._said = self._said, []
            return said
        if self._queue:
            flow, command = self._queue.popleft()
            with self._watch.over(self._name(flow, command)):
                return self._carry_out(flow, command)
        if self._streams:
            command, flow, *_ = self._streams[0]
            with self._watch.over(self._name(flow, command)):
                return self._advance_stream()
        return []

    def _name(self, flow: str, command: Command) -> str:
        if isinstance(command, CallCommand):
            return call_name(self.graphs[flow], command)
        return type(command).__name__

    def _carry_out(self, flow: str, command: Command) -> list[Report]:
        start = time.time()
        match command:
            case RunCall():
                host = self._on(command.lanes[0])
                if self.graphs[flow].nodes[command.node].streaming:
                    self._streams.append((command, flow, host.call(flow, command), start))
                    return []
                pieces = []
                for piece in host.call(flow, command):
                    self._watch.heard()
                    if piece is not None:
                        pieces.append(Report(piece))
                return [*pieces, host.finished(flow, command, start)]
            case RunFinish():
                host = self._on(command.lanes[0])
                metrics = host.finish(flow, command)
                return [host.finished(flow, command, start, metrics)]
            case ExportWeights():
                return [self._on(command.lanes[0]).finished(flow, command, start)]
            case InstallWeights(source=source, target=target, version=version):
                host = self._on(command.lanes[0])
                weights, num_bytes = host.weights_of(source)
                host.workers[target].install(weights, version)
                host.versions[target] = version
                published = Published(source, num_bytes, time.time() - start)
                return [host.finished(flow, command, start, published=published)]
            case MoveState():
                return [self._on(command.lane).move(command)]
            case FeedCall():
                self._on(command.lanes[0])
                self._host.feed(flow, command)
                return [Report(None)]
        raise AssertionError(f"no lane carries out {command}")

    def _on(self, lane: int) -> LaneHost:
        self._host.lane = lane
        return self._host

    def _advance_stream(self) -> list[Report]:
        command, flow, stream, start = self._streams.popleft()
        host = self._on(command.lanes[0])
        for piece in stream:
            self._streams.append((command, flow, stream, start))
            return [Report(piece or ItemsProduced(command.call, command.lanes[0], ()))]
        return [host.finished(flow, command, start)]

    def collect(self, flow: str, command: CompleteStep) -> Future[Batch]:
        graph = self.graphs[flow]
        wanted = [(part.producer, part.items) for part in command.output]
        output: Future[Batch] = Future()
        try:
            output.set_result(
                joined_exits(
                    graph,
                    graph.output_nodes,
                    lambda: self._host.store.gather(flow, command.step, wanted),
                )
            )
        except UserError as error:
            output.set_exception(error)
        return output

    def drop(self, flow: str, step: int) -> None:
        self._host.store.drop_step(flow, step)

    def take_back(
        self, flow: str, steps: Iterable[int], calls: Iterable[AbortCall], seconds: float
    ) -> None:
        """Forget what was asked for, and what steps have made; between two events nobody works."""
        self._queue = deque(one for one in self._queue if isinstance(one[1], MoveState))
        self._streams.clear()
        self._said.clear()
        for step in steps:
            self.drop(flow, step)

    def worker_call(self, worker: str, method: str, *args: Any) -> Any:
        """Call a method of a worker that is no stage, after the moves that were asked for."""
        while self._queue and isinstance(self._queue[0][1], MoveState):
            self._said += self._carry_out(*self._queue.popleft())
        with self._watch.over(f"{worker}.{method}"):
            return getattr(self._host.workers[worker], method)(*args)

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """Call a method of a worker on its one copy; the answer, in a list."""
        return [self.worker_call(worker, method, *args)]

    def close(self) -> None:
        self._watch.close()
        try:
            self._close_workers()
        finally:
            if self._journal is not None:
                self._journal.close()
            self._on_close()

    def _close_workers(self) -> None:
        from m2flow.runtime.lane.loading import close_workers  # torch comes along

        close_workers(self._host)
