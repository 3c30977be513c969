"""The simulated driver: the engine under a virtual clock, with stage times from a cost model.

It plays the part of lanes exactly as far as the engine can see them, and checks what real lanes
rely on: a lane runs one call at a time, inputs are there when they are read, nothing is read after
its release. Tests and the planner stand on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from m2flow.engine.core import Engine
from m2flow.engine.messages import (
    CallFinished,
    Command,
    CompleteStep,
    Event,
    ExportWeights,
    FailRun,
    FeedCall,
    Inputs,
    InstallWeights,
    ItemsProduced,
    MoveState,
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span, SpanKind
from m2flow.errors import RunFailed
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode


class Costs(Protocol):
    """How long things take, in virtual seconds, and how large they are."""

    def call(self, node: StageNode, num_items: int) -> float:
        """A call of a stage on so many input items (on one lane of a gang)."""
        ...

    def item(self, node: StageNode, step: int, item: int) -> float:
        """For a streaming stage: how long one output item takes from its start."""
        ...

    def finish(self, node: StageNode) -> float:
        """The `finish` of a mini-batch."""
        ...

    def publish(self, source: str, target: str | None) -> float:
        """Export of the source's weights (no target), or install in the target on one lane."""
        ...

    def move(self, worker: str, what: str) -> float:
        """Offload or onload of a worker on one lane."""
        ...

    def item_bytes(self, node: StageNode) -> int:
        """Size of one output item."""
        ...

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        """Whether an item leaves its loop now that this member has worked on it."""
        ...


@dataclass(slots=True)
class SimulatedRun:
    """What a simulation gives.

    Attributes:
        step_ends: virtual second at which each step was complete.
        spans: what each lane did.
        worked_on: (stage, step, item) to how often a call took it.
        peak_items: for each stage, the most output items that were made or in the making and not
            released, over all steps.
        staleness: version lag to items.
        num_events: events the engine has handled.
    """

    step_ends: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    worked_on: dict[tuple[int, int, int], int] = field(default_factory=dict)
    peak_items: dict[int, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    num_events: int = 0


@dataclass(slots=True)
class _Streaming:
    """A streaming call in progress on a virtual lane."""

    node: StageNode
    step: int
    lane: int
    pending: int = 0
    end: float = 0.0
    ends_set_down: int = 0


class Simulation:
    """Runs a plan in virtual time.

    Args:
        graph, plan: as for `Engine`.
        costs: stage times.
        tie_break: a number by which simultaneous events are ordered, asked for once an event; by
            default they keep the order in which they were made.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        costs: Costs,
        tie_break: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.graph, self.plan, self.costs, self.tie_break = graph, plan, costs, tie_break
        self.engine = Engine(graph, plan)
        self.record = SimulatedRun()
        self.now = 0.0
        self._sequence = count()
        self._events: list[tuple[float, float, int, tuple[Event, ...]]] = []
        self._running: dict[int, int] = {}
        self._free_at = {lane.id: 0.0 for lane in plan.lanes}
        self._streaming: dict[int, _Streaming] = {}
        self._there: dict[tuple[int, int], set[int]] = {}
        self._held = dict.fromkeys(range(SOURCE, len(graph.nodes)), 0)

    def run(self, num_items: int, num_steps: int) -> SimulatedRun:
        """Play steps of `num_items` source items, as many at once as the staleness allows.

        Raises:
            RunFailed: the engine stopped the run.
        """
        submitted = 0
        while len(self.record.step_ends) < num_steps:
            in_flight = submitted - len(self.record.step_ends)
            if submitted < num_steps and in_flight <= self.plan.max_staleness:
                self._there[submitted, SOURCE] = set(range(num_items))
                self._held[SOURCE] += num_items
                self._handle(StepSubmitted(submitted, num_items))
                submitted += 1
                continue
            self.now, _, _, events = heappop(self._events)
            self._handle(Tick(self.now))
            for event in events:
                self._play(event)
        return self.record

    def _play(self, event: Event) -> None:
        match event:
            case ItemsProduced(call=call, items=items):
                if stream := self._streaming.get(call):
                    stream.pending -= len(items)
                command = self.engine.calls[call].command
                assert isinstance(command, RunCall)
                self._there.setdefault((command.step, command.node), set()).update(items)
            case CallFinished(call=call, lane=lane):
                if stream := self._streaming.get(call):
                    stream.ends_set_down -= 1
                    if stream.pending or stream.ends_set_down:
                        if not stream.ends_set_down:  # its last items come at this very moment
                            self._set_down_end(call, stream)
                        return
                    del self._streaming[call]
                assert self._running.pop(lane) == call
        self._handle(event)

    def _handle(self, event: Event) -> None:
        self.record.num_events += 1
        for command in self.engine.handle(event):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case RunCall(node=index):
                self._run_call(command, self.graph.nodes[index])
            case FeedCall(call=call, inputs=inputs):
                if stream := self._streaming.get(call):  # else it has run dry: given back
                    self._stream(call, stream, self._read(command.step, inputs), self.now)
            case RunFinish(node=index, lanes=lanes, call=call):
                node = self.graph.nodes[index]
                for lane in lanes:
                    self._occupy(lane, call, node.name, "finish", self.costs.finish(node))
            case ExportWeights(source=source, lanes=(lane,), call=call):
                self._occupy(lane, call, source, "publish", self.costs.publish(source, None))
            case InstallWeights(source=source, target=target, lanes=(lane,), call=call):
                self._occupy(lane, call, target, "publish", self.costs.publish(source, target))
            case MoveState(what=what, worker=worker, lane=lane):
                self._spend(lane, worker, "switch", self.costs.move(worker, what))
            case ReleaseItems(step=step, producer=producer, items=items):
                self._there[step, producer].difference_update(items)
                self._held[producer] -= len(items)
            case CompleteStep():
                self._complete(command)
            case FailRun(message=message, cause=cause):
                raise RunFailed(message) from cause

    def _run_call(self, command: RunCall, node: StageNode) -> None:
        for lane, inputs in zip(command.lanes, command.inputs, strict=True):
            items = self._read(command.step, inputs)
            if node.streaming:
                stream = _Streaming(node, command.step, lane)
                self._streaming[command.call] = stream
                start = self._occupy(lane, command.call, node.name, None, 0.0)
                self._stream(command.call, stream, items, start)
                continue
            self._lease(node, command.step, items)
            outputs = [item * node.expands + k for item in items for k in range(node.expands)]
            leaving: list[int] = []
            if node.loop is not None:
                leaving = [i for i in outputs if self.costs.leaves(node, command.step, i)]
            num_bytes = self.costs.item_bytes(node) * len(outputs)
            produced = ItemsProduced(command.call, tuple(outputs), num_bytes, tuple(leaving))
            seconds = self.costs.call(node, len(items))
            self._occupy(lane, command.call, node.name, "call", seconds, produced)

    def _stream(self, number: int, stream: _Streaming, items: list[int], start: float) -> None:
        node = stream.node
        self._lease(node, stream.step, items)
        size = self.costs.item_bytes(node)
        for item in items:
            for output in range(item * node.expands, (item + 1) * node.expands):
                end = start + self.costs.item(node, stream.step, output)
                stream.pending += 1
                stream.end = max(stream.end, end)
                self._at(end, ItemsProduced(number, (output,), size))
        self._set_down_end(number, stream)
        self._free_at[stream.lane] = stream.end
        self.record.spans.append(Span(stream.lane, node.name, "call", start, stream.end))

    def _set_down_end(self, number: int, stream: _Streaming) -> None:
        stream.ends_set_down += 1
        self._at(stream.end, CallFinished(number, stream.lane))

    def _occupy(
        self,
        lane: int,
        call: int,
        name: str,
        kind: SpanKind | None,
        seconds: float,
        produced: ItemsProduced | None = None,
    ) -> float:
        """Start a call on a lane; with a kind, also set down its end. Returns when it starts."""
        assert lane not in self._running, f"lane {lane} was given a call while it ran another"
        self._running[lane] = call
        if kind is None:
            return max(self.now, self._free_at[lane])
        end = self._spend(lane, name, kind, seconds)
        finished = CallFinished(call, lane)
        self._at(end, *((produced, finished) if produced else (finished,)))
        return end - seconds

    def _spend(self, lane: int, name: str, kind: SpanKind, seconds: float) -> float:
        start = max(self.now, self._free_at[lane])
        self._free_at[lane] = start + seconds
        self.record.spans.append(Span(lane, name, kind, start, start + seconds))
        return start + seconds

    def _at(self, when: float, *events: Event) -> None:
        heappush(self._events, (when, self.tie_break(), next(self._sequence), events))

    def _read(self, step: int, inputs: Inputs) -> list[int]:
        """The items of a call; every one must be there on every input."""
        streams = []
        for parts in inputs:
            for part in parts:
                missing = set(part.items) - self._there.get((step, part.producer), set())
                assert not missing, f"items {sorted(missing)} of {part.producer} are not there"
            streams.append(sorted(item for part in parts for item in part.items))
        assert all(items == streams[0] for items in streams), "inputs are not aligned"
        return streams[0]

    def _lease(self, node: StageNode, step: int, items: list[int]) -> None:
        for item in items:
            key = (node.index, step, item)
            self.record.worked_on[key] = self.record.worked_on.get(key, 0) + 1
        if node.loop is None:
            self._held[node.index] += len(items) * node.expands
            peak = self.record.peak_items.get(node.index, 0)
            self.record.peak_items[node.index] = max(peak, self._held[node.index])

    def _complete(self, command: CompleteStep) -> None:
        self.record.step_ends[command.step] = self.now
        for lag, items in command.staleness.items():
            self.record.staleness[lag] = self.record.staleness.get(lag, 0) + items
        for step, producer in [key for key in self._there if key[0] == command.step]:
            self._held[producer] -= len(self._there.pop((step, producer)))
