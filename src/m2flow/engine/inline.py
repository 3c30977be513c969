"""The inline driver: every lane in this process and on this thread, no Ray.

Commands are carried out one after the other, on the very Worker objects the user made, so that
`breakpoint()` inside a stage works and a traceback is the stage's own. A plan with several lanes
runs too, one lane at a time, as long as no worker stands on two of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from m2flow.engine.host import LaneHost, Produced
from m2flow.engine.messages import (
    CallFinished,
    Command,
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
from m2flow.engine.runner import Report
from m2flow.engine.spans import Span
from m2flow.errors import PlanError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import SOURCE, FlowGraph
from m2flow.flow.worker import Place, Worker


class InlineCarrier:
    """Carries out commands in this process.

    Args:
        graphs: the flow's traced methods by name.
        plan: gives the lanes and the placement of workers.
        workers: the flow's workers; `load` is called here.
        num_threads: threads a worker may use.
        device: where tensors live.
        version: number of the weights that the run begins with.
    """

    def __init__(
        self,
        graphs: Mapping[str, FlowGraph],
        plan: Plan,
        workers: Mapping[str, Worker],
        num_threads: int = 1,
        device: str = "cpu",
        version: int = 0,
    ) -> None:
        for name, placement in plan.placements.items():
            if name in workers and len(placement.lanes) > 1:
                raise PlanError(
                    f"stands on {len(placement.lanes)} lanes, and one process holds one copy of it",
                    key=name,
                    hint="use a plan with one lane, or run it on Ray",
                )
        self.graphs = graphs
        self._host = LaneHost(0, graphs, workers)
        self._queue: deque[tuple[str, Command]] = deque()
        self._streams: deque[tuple[RunCall, str, Iterator[Produced], float]] = deque()
        for name, worker in workers.items():
            if name in plan.placements:
                lane = plan.placements[name].lanes[0]
                place = Place(lane, device=device, num_threads=num_threads, version=version)
                worker.load(place)

    def submit(self, flow: str, step: int, batch: Batch) -> None:
        self._host.store.put(flow, step, SOURCE, batch)

    def carry_out(self, flow: str, command: Command) -> None:
        if isinstance(command, ReleaseItems):
            self._host.store.release(flow, command.step, command.producer, command.items)
        else:
            self._queue.append((flow, command))

    def wait(self, seconds: float) -> list[Report]:
        """Carry out the next command, or one piece of a streaming call."""
        if self._queue:
            return self._carry_out(*self._queue.popleft())
        if self._streams:
            return self._advance_stream()
        return []

    def _carry_out(self, flow: str, command: Command) -> list[Report]:
        start = time.time()
        match command:
            case RunCall():
                host = self._on(command.lanes[0])
                if self.graphs[flow].nodes[command.node].streaming:
                    self._streams.append((command, flow, host.call(flow, command), start))
                    return []
                produced = [_items_produced(command.call, p) for p in host.call(flow, command)]
                return [*map(Report, produced), self._finished(flow, command, start)]
            case RunFinish():
                metrics = self._on(command.lanes[0]).finish(flow, command)
                return [self._finished(flow, command, start, metrics)]
            case ExportWeights():
                return [self._finished(flow, command, start)]
            case InstallWeights(source=source, target=target, version=version):
                weights = self._host.workers[source].weights()
                self._host.install(source, target, version, weights)
                return [self._finished(flow, command, start)]
            case MoveState():
                self._host.move(command)
                span = Span(command.lane, command.worker, "switch", start, time.time())
                return [Report(None, (span,))]
            case FeedCall():
                self._host.feed(flow, command)
                return [Report(None)]
        raise AssertionError(f"no lane carries out {command}")

    def _on(self, lane: int) -> LaneHost:
        self._host.lane = lane
        return self._host

    def _advance_stream(self) -> list[Report]:
        command, flow, stream, start = self._streams.popleft()
        self._on(command.lanes[0])
        produced = next(stream, None)
        if produced is None:
            return [self._finished(flow, command, start)]
        self._streams.append((command, flow, stream, start))
        return [Report(_items_produced(command.call, produced))]

    def _finished(
        self,
        flow: str,
        command: RunCall | RunFinish | ExportWeights | InstallWeights,
        start: float,
        metrics: Mapping[str, float] | None = None,
    ) -> Report:
        span = call_span(self.graphs[flow], command, command.lanes[0], start, time.time())
        return Report(CallFinished(command.call, command.lanes[0]), (span,), metrics)

    def collect(self, flow: str, step: int) -> Batch:
        output = self._host.store.all_of(flow, step, self.graphs[flow].output_nodes)
        self._host.store.drop_step(flow, step)
        return output

    def worker_call(self, worker: str, method: str, *args: Any) -> Any:
        """Call a method of a worker that is no stage."""
        return getattr(self._host.workers[worker], method)(*args)

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """The same, as a list: there is one copy of each worker."""
        return [self.worker_call(worker, method, *args)]

    def close(self) -> None:
        for worker in self._host.workers.values():
            worker.close()


def _items_produced(call: int, produced: Produced) -> ItemsProduced:
    return ItemsProduced(call, produced.items, produced.num_bytes, produced.leaving)


def call_span(
    graph: FlowGraph,
    command: RunCall | RunFinish | ExportWeights | InstallWeights,
    lane: int,
    start: float,
    end: float,
) -> Span:
    """The span of a call that a lane has finished."""
    match command:
        case RunCall(node=node, step=step):
            share = command.inputs[command.lanes.index(lane)]
            items = sum(len(part.items) for part in share[0])
            name = graph.nodes[node].name
            return Span(lane, name, "call", start, end, {"step": step, "items": items})
        case RunFinish(node=node, step=step, minibatch=minibatch):
            name = graph.nodes[node].name
            return Span(lane, name, "finish", start, end, {"step": step, "minibatch": minibatch})
        case ExportWeights(source=worker, version=version):
            return Span(lane, worker, "publish", start, end, {"version": version})
        case InstallWeights(target=worker, version=version):
            return Span(lane, worker, "publish", start, end, {"version": version})
