"""The simulated driver: the engine under a virtual clock, with stage times from a cost model.

It plays the part of lanes exactly as far as the engine can see them, and checks what real lanes
rely on: a lane runs one call at a time, inputs are there when they are read, nothing is read after
its release. Tests and the planner stand on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count
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
        worked_on: (stage, step, item) to how often it was worked on.
        peak_items: for each stage, the most output items that were made or in the making and not
            released, over all steps.
        staleness: version lag to items.
        num_events: events the engine has handled.
        peak_bytes: for each lane with a memory limit, the most that resident states (from the start
            of an onload to the end of an offload) and the call at hand took together.
    """

    step_ends: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    worked_on: dict[tuple[int, int, int], int] = field(default_factory=dict)
    peak_items: dict[int, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    num_events: int = 0
    peak_bytes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Memory:
    """What a lane's memory is taken by: resident states by their changes, and calls."""

    changes: list[tuple[float, int]] = field(default_factory=list)
    calls: list[tuple[float, float, int]] = field(default_factory=list)

    def peak(self) -> int:
        """The most at any moment; what goes at a moment goes before what comes."""
        changes, busy_until = list(self.changes), 0.0
        for start, end, room in sorted(self.calls):
            start = max(start, busy_until)  # a call that is fed is written down again and again
            if start < end:
                changes += [(start, room), (end, -room)]
                busy_until = end
        return max(accumulate((change for _, change in sorted(changes)), initial=0))


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
        length: how long an item of a stage (or SOURCE) is said to take, by stage, step and item,
            where a reader of it declares a length; nothing is said by default.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        costs: Costs,
        tie_break: Callable[[], float] = lambda: 0.0,
        length: Callable[[int, int, int], float] | None = None,
    ) -> None:
        self.graph, self.plan, self.costs, self.tie_break = graph, plan, costs, tie_break
        self._length = length
        self.engine = Engine(graph, plan)
        self.record = SimulatedRun()
        self.now = 0.0
        self._sequence = count()
        self._events: list[tuple[float, float, int, tuple[Event, ...]]] = []
        self._running: dict[int, int] = {}
        self._free_at = {lane.id: 0.0 for lane in plan.lanes}
        self._began = dict(self._free_at)
        self._side_free_at = dict(self._free_at)
        self._onloaded: dict[tuple[int, str], float] = {}
        self._memory = {lane.id: _Memory() for lane in plan.lanes if lane.memory_bytes is not None}
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
                lengths = self._lengths(SOURCE, submitted, range(num_items))
                self._handle(StepSubmitted(submitted, num_items, lengths))
                submitted += 1
                continue
            self.now, _, _, events = heappop(self._events)
            self._handle(Tick(self.now))
            for event in events:
                self._play(event)
        self.record.peak_bytes = {lane: book.peak() for lane, book in self._memory.items()}
        return self.record

    def _lengths(self, producer: int, step: int, items: Sequence[int]) -> tuple[float, ...]:
        if self._length is None or self.graph.length_column(producer) is None:
            return ()
        return tuple(self._length(producer, step, item) for item in items)

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
                    start = max(self.now, self._began[stream.lane])  # not before the call begins
                    self._stream(call, stream, self._read(command.step, inputs), start)
            case RunFinish(node=index, lanes=lanes, call=call):
                node = self.graph.nodes[index]
                for lane in lanes:
                    start = self._begin(lane, call, node)
                    self._end(lane, call, self._spend(lane, node, "finish", start))
            case ExportWeights(source=source, lanes=lanes, call=call):
                for lane in lanes:
                    self._publish(lane, call, source, None)
            case InstallWeights(source=source, target=target, lanes=(lane,), call=call):
                self._publish(lane, call, source, target)
            case MoveState():
                self._move(command)
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
                start = self._begin(lane, command.call, node)
                self._stream(command.call, stream, items, start)
            elif command.fused:
                self._run_loop(command, node, items, lane)
            else:
                self._run_stage(command, node, items, lane)

    def _run_stage(self, command: RunCall, node: StageNode, items: list[int], lane: int) -> None:
        self._lease(node, command.step, items)
        outputs = [item * node.expands + k for item in items for k in range(node.expands)]
        leaving: list[int] = []
        if node.loop is not None:
            leaving = [i for i in outputs if self.costs.leaves(node, command.step, i)]
        produced = self._produced(command, node, outputs, leaving)
        start = self._begin(lane, command.call, node)
        end = self._spend(lane, node, "call", start, self.costs.call(node, len(items)))
        self._end(lane, command.call, end, produced)

    def _run_loop(self, command: RunCall, first: StageNode, items: list[int], lane: int) -> None:
        """Go around a loop on one lane: each member's call costs what it costs outside of it."""
        assert first.loop is not None
        spec = self.graph.loops[first.loop]
        now = self._begin(lane, command.call, *(self.graph.nodes[i] for i in spec.members))
        pieces: dict[float, list[ItemsProduced]] = {now: []}
        turn = 0
        while items:
            turn += 1
            for index in spec.members:
                node = self.graph.nodes[index]
                self._lease(node, command.step, items)
                now = self._spend(lane, node, "call", now, self.costs.call(node, len(items)))
                gone = [i for i in items if self.costs.leaves(node, command.step, i)]
                if index == spec.members[-1] and turn == spec.max_turns:
                    gone = items
                if gone:
                    piece = self._produced(command, node, gone, gone)
                    pieces.setdefault(now, []).append(piece)
                    items = [item for item in items if item not in set(gone)]
                if not items:
                    break
        last = pieces.pop(now)
        for when, some in pieces.items():
            self._at(when, *some)
        self._end(lane, command.call, now, *last)

    def _produced(
        self, command: RunCall, node: StageNode, outputs: list[int], leaving: list[int]
    ) -> ItemsProduced:
        size = self.costs.item_bytes(node) * len(outputs)
        index = node.index if node.loop is None else self.graph.loops[node.loop].members[-1]
        lengths = self._lengths(index, command.step, outputs)
        return ItemsProduced(command.call, tuple(outputs), size, tuple(leaving), lengths)

    def _stream(self, number: int, stream: _Streaming, items: list[int], start: float) -> None:
        node = stream.node
        self._lease(node, stream.step, items)
        size = self.costs.item_bytes(node)
        for item in items:
            for output in range(item * node.expands, (item + 1) * node.expands):
                end = start + self.costs.item(node, stream.step, output)
                stream.pending += 1
                stream.end = max(stream.end, end)
                lengths = self._lengths(node.index, stream.step, (output,))
                self._at(end, ItemsProduced(number, (output,), size, lengths=lengths))
        self._set_down_end(number, stream)
        self._spend(stream.lane, node, "call", start, stream.end - start)

    def _set_down_end(self, number: int, stream: _Streaming) -> None:
        stream.ends_set_down += 1
        self._at(stream.end, CallFinished(number, stream.lane))

    def _publish(self, lane: int, call: int, source: str, target: str | None) -> None:
        workers = (source,) if target is None else (source, target)
        start = self._take_lane(lane, call, workers)
        end = self._free_at[lane] = start + self.costs.publish(source, target)
        self.record.spans.append(Span(lane, target or source, "publish", start, end))
        self._end(lane, call, end)

    def _move(self, command: MoveState) -> None:
        """A move in turn with the lane's commands, or beside the call that has just begun."""
        lane, worker = command.lane, command.worker
        seconds = self.costs.move(worker, command.what)
        if command.early:
            start = max(self._began[lane], self._side_free_at[lane])
            self._side_free_at[lane] = start + seconds
        else:
            start = self._start_of(lane, (worker,))
            self._free_at[lane] = start + seconds
        end = start + seconds
        if command.what == "onload":
            self._onloaded[lane, worker] = end
        size = self.plan.placements[worker].state_bytes
        at, change = (start, size) if command.what == "onload" else (end, -size)
        self._memory[lane].changes.append((at, change))
        facts = {"what": command.what, "early": command.early}
        self.record.spans.append(Span(lane, worker, "switch", start, end, facts))

    def _start_of(self, lane: int, workers: Iterable[str]) -> float:
        """When a lane comes to a command that needs these workers: it waits for early onloads."""
        ready = (self._onloaded.get((lane, worker), 0.0) for worker in workers)
        return max(self.now, self._free_at[lane], *ready)

    def _begin(self, lane: int, call: int, *nodes: StageNode) -> float:
        """Start a call of these stages on a lane; when that is."""
        return self._take_lane(lane, call, [node.worker for node in nodes])

    def _take_lane(self, lane: int, call: int, workers: Iterable[str]) -> float:
        assert lane not in self._running, f"lane {lane} was given a call while it ran another"
        self._running[lane] = call
        start = self._began[lane] = self._start_of(lane, workers)
        return start

    def _spend(
        self,
        lane: int,
        node: StageNode,
        kind: SpanKind,
        start: float,
        seconds: float | None = None,
    ) -> float:
        """Work on a stage, or on its `finish`, from a moment on; when that ends."""
        end = start + (self.costs.finish(node) if seconds is None else seconds)
        self._free_at[lane] = max(self._free_at[lane], end)
        self.record.spans.append(Span(lane, node.name, kind, start, end))
        if lane in self._memory:
            room = self.plan.placements[node.worker].working_bytes
            self._memory[lane].calls.append((start, end, room))
        return end

    def _end(self, lane: int, call: int, when: float, *produced: ItemsProduced) -> None:
        self._at(when, *produced, CallFinished(call, lane))

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
