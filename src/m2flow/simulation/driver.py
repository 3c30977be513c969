"""The simulated driver: the engine under a virtual clock, with stage times from a cost model.

It plays the part of lanes exactly as far as the engine can see them, and checks what real lanes
rely on: a lane runs one call at a time, inputs are there when they are read, nothing is read after
its release. What lies on another lane is brought to the reading one before its call, as real lanes
do it. Tests and the planner stand on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from m2flow.engine.core import Engine
from m2flow.engine.facts import ids_text
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
    LaneCommand,
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
from m2flow.simulation.items import VirtualItems
from m2flow.simulation.run import LaneMemory, SimulatedRun
from m2flow.simulation.stream import VirtualStream
from m2flow.simulation.timing import Costs, Plain, Timing

__all__ = ["Costs", "SimulatedRun", "Simulation"]


@dataclass(frozen=True, slots=True)
class _Next:
    """The next thing that happens in a streaming call, unless its ticket has changed."""

    stream: VirtualStream
    ticket: int


class Simulation:
    """Runs a plan in virtual time.

    Args:
        graph, plan: as for `Engine`.
        costs: stage times, in the short form or in full.
        tie_break: a number by which simultaneous events are ordered, asked for once an event; by
            default they keep the order in which they were made.
        length: how long an item of a stage (or SOURCE) is said to take, by stage, step and item,
            where a reader of it declares a length; nothing is said by default.
        detailed: whether spans say which items they are of, as those of real lanes do.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        costs: Costs | Timing,
        tie_break: Callable[[], float] = lambda: 0.0,
        length: Callable[[int, int, int], float] | None = None,
        detailed: bool = False,
    ) -> None:
        self.graph, self.plan, self.costs, self.tie_break = graph, plan, costs, tie_break
        self._timing: Timing = costs if isinstance(costs, Timing) else Plain(costs)
        self._together = isinstance(costs, Timing)
        self._length, self._detailed = length, detailed
        self.engine = Engine(graph, plan)
        self.record = SimulatedRun()
        self.now = 0.0
        self._sent_at = 0.0  # when the commands at hand leave the controller
        self._sequence = count()
        self._events: list[tuple[float, float, int, int, tuple[Event, ...] | _Next]] = []
        self._running: dict[int, int] = {}
        self._free_at = {lane.id: 0.0 for lane in plan.lanes}
        self._began = dict(self._free_at)
        self._side_free_at = dict(self._free_at)
        self._onloaded: dict[tuple[int, str], float] = {}
        self._memory = {
            lane.id: LaneMemory() for lane in plan.lanes if lane.memory_bytes is not None
        }
        self._streams: dict[int, VirtualStream] = {}
        self._items = VirtualItems(graph, self.record)

    def run(self, num_items: int, num_steps: int) -> SimulatedRun:
        """Play steps of `num_items` source items, as many at once as the staleness allows.

        Raises:
            RunFailed: the engine stopped the run.
        """
        submitted = 0
        while len(self.record.step_ends) < num_steps:
            in_flight = submitted - len(self.record.step_ends)
            if submitted < num_steps and in_flight <= self.plan.max_staleness:
                self._items.submit(submitted, num_items)
                lengths = self._lengths(SOURCE, submitted, range(num_items))
                self.record.step_starts[submitted] = self.now
                self._handle(StepSubmitted(submitted, num_items, lengths))
                submitted += 1
                continue
            when, _, _, lane, news = heappop(self._events)
            if isinstance(news, _Next):
                if news.ticket != news.stream.ticket:
                    continue
                self.now = when
                self._handle(Tick(when))
                self._advance(news.stream)
                continue
            self.now = when
            self._handle(Tick(when))
            self._play(lane, *news)
        self.record.peak_bytes = {lane: book.peak() for lane, book in self._memory.items()}
        return self.record

    def _lengths(self, producer: int, step: int, items: Sequence[int]) -> tuple[float, ...]:
        if self._length is None or self.graph.length_column(producer) is None:
            return ()
        return tuple(self._length(producer, step, item) for item in items)

    def _play(self, lane: int, *events: Event) -> None:
        """What a lane says at one moment."""
        for event in events:
            match event:
                case ItemsProduced(call=call, items=items):
                    command = self.engine.calls[call].command
                    assert isinstance(command, RunCall)
                    self._items.put(command.step, command.node, items, lane)
                case CallFinished(call=call):
                    assert self._running.pop(lane) == call
        self._handle(*events)

    def _handle(self, *events: Event) -> None:
        self.record.num_events += len(events)
        self._sent_at = max(self._sent_at, self.now) + self._timing.control(events)
        for command in self.engine.handle(*events):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case RunCall(node=index):
                self._run_call(command, self.graph.nodes[index])
            case FeedCall():
                self._feed(command)
            case RunFinish(node=index):
                self._finish(command, self.graph.nodes[index])
            case ExportWeights(source=source, lanes=lanes):
                for lane in lanes:
                    self._publish(command, lane, (source,))
            case InstallWeights(source=source, target=target, lanes=(lane,)):
                self._publish(command, lane, (source, target))
            case MoveState():
                self._move(command)
            case ReleaseItems(step=step, producer=producer, items=items):
                self._items.release(step, producer, items)
            case CompleteStep():
                self._complete(command)
            case FailRun(message=message, cause=cause):
                raise RunFailed(message) from cause

    # --- calls ------------------------------------------------------------------------------------

    def _run_call(self, command: RunCall, node: StageNode) -> None:
        shares = [self._items.read(command.step, inputs) for inputs in command.inputs]
        workers = [node.worker]
        if command.fused and node.loop is not None:
            members = self.graph.loops[node.loop].members
            workers = [self.graph.nodes[index].worker for index in members]
        start = 0.0
        for lane, inputs in zip(command.lanes, command.inputs, strict=True):
            begin = self._take_lane(lane, command, workers)
            start = max(start, self._bring(node, command.step, lane, inputs, begin))
        if node.streaming:
            lane = command.lanes[0]
            pace = partial(self._timing.round, node, lane)
            slots = self._timing.slots(node, lane)
            stream = VirtualStream(node, command.step, lane, command.call, start, pace, slots)
            self._streams[command.call] = stream
            self._stream(stream, shares[0], start)
        elif command.fused:
            ((lane, items),) = zip(command.lanes, shares, strict=True)
            self._run_loop(command, node, items, lane, start)
        else:
            self._run_stage(command, node, shares, start)

    def _run_stage(
        self, command: RunCall, node: StageNode, shares: list[list[int]], start: float
    ) -> None:
        step = command.step
        seconds = self._timing.call(node, step, command.lanes, shares)
        for lane, items in zip(command.lanes, shares, strict=True):
            self._items.work_on(node, step, items)
            outputs = [item * node.expands + k for item in items for k in range(node.expands)]
            leaving: list[int] = []
            if node.loop is not None:
                leaving = [i for i in outputs if self._timing.leaves(node, step, i)]
            produced = self._produced(command, node, outputs, leaving)
            facts = self._facts(step, items, command.call)
            end = self._spend(lane, node, "call", start, seconds, facts)
            self._end(lane, command.call, end, produced)

    def _run_loop(
        self, command: RunCall, first: StageNode, items: list[int], lane: int, now: float
    ) -> None:
        """Go around a loop on one lane: each member's call costs what it costs outside of it."""
        assert first.loop is not None
        spec = self.graph.loops[first.loop]
        pieces: dict[float, list[ItemsProduced]] = {now: []}
        turn, step = 0, command.step
        while items:
            turn += 1
            for index in spec.members:
                node = self.graph.nodes[index]
                self._items.work_on(node, step, items)
                seconds = self._timing.call(node, step, (lane,), (items,))
                facts = self._facts(step, items)
                now = self._spend(lane, node, "call", now, seconds, facts)
                gone = [i for i in items if self._timing.leaves(node, step, i)]
                if index == spec.members[-1] and turn == spec.max_turns:
                    gone = items
                if gone:
                    piece = self._produced(command, node, gone, gone)
                    pieces.setdefault(now, []).append(piece)
                    left = set(gone)
                    items = [item for item in items if item not in left]
                if not items:
                    break
            if now - next(reversed(pieces)) > self.plan.deadline_seconds / 2:  # a sign of life
                pieces[now] = [self._produced(command, first, [], [])]
        last = pieces.pop(now)
        for when, some in pieces.items():
            self._at(when, lane, *some)
        self._end(lane, command.call, now, *last)

    def _produced(
        self, command: RunCall, node: StageNode, outputs: list[int], leaving: list[int]
    ) -> ItemsProduced:
        size = self._timing.item_bytes(node) * len(outputs)
        index = node.index if node.loop is None else self.graph.loops[node.loop].members[-1]
        lengths = self._lengths(index, command.step, outputs)
        return ItemsProduced(command.call, tuple(outputs), size, tuple(leaving), lengths)

    # --- streaming calls --------------------------------------------------------------------------

    def _feed(self, command: FeedCall) -> None:
        stream = self._streams.get(command.call)
        if stream is None:  # it has run dry: the items are given back when its end is told
            return
        start = max(self.now, stream.began)  # not before the call begins
        items = self._items.read(command.step, command.inputs)
        ready = self._bring_to_all(stream, command.inputs, start)
        self._stream(stream, items, start, ready - start)

    def _stream(
        self, stream: VirtualStream, items: list[int], start: float, wait: float = 0.0
    ) -> None:
        """Give items to a streaming call, which waits until they are there."""
        node = stream.node
        if not items:
            return
        self._items.work_on(node, stream.step, items)
        admitted = self._timing.admit(node, stream.step, stream.lane, items)
        outputs = [item * node.expands + k for item in items for k in range(node.expands)]
        stream.take(start, items, outputs, admitted.needs, admitted.pause + wait)
        if self._detailed:
            stream.log_taken.append([start - stream.began, ids_text(items)])
        self._set_down(stream)

    def _bring_to_all(self, stream: VirtualStream, inputs: Inputs, start: float) -> float:
        """Bring items to every lane of a streaming call; when the last lane has them."""
        lanes = self.engine.calls[stream.call].command.lanes
        return max(self._bring(stream.node, stream.step, x, inputs, start) for x in lanes)

    def _set_down(self, stream: VirtualStream) -> None:
        """Say when the next thing happens in a streaming call."""
        news = _Next(stream, stream.ticket)
        order = self.tie_break(), next(self._sequence)
        heappush(self._events, (stream.next_end(), *order, stream.lane, news))

    def _advance(self, stream: VirtualStream) -> None:
        """An item of a streaming call is finished, or the call is at its end."""
        if stream.idle:
            self._end_stream(stream)
            return
        stream.finish_next(self.now, together=self._together)
        finished, running = len(stream.unsaid), stream.running
        said: tuple[int, ...] = ()
        if not running or self._timing.hands_on(stream.node, finished, running):
            said = stream.say()
        self._set_down(stream)
        if said:
            self._play(stream.lane, self._said(stream, said))

    def _said(self, stream: VirtualStream, items: tuple[int, ...]) -> ItemsProduced:
        if self._detailed:
            stream.log_pieces.append([self.now - stream.began, ids_text(items), []])
        size = self._timing.item_bytes(stream.node) * len(items)
        lengths = self._lengths(stream.node.index, stream.step, items)
        return ItemsProduced(stream.call, items, size, lengths=lengths)

    def _end_stream(self, stream: VirtualStream) -> None:
        """All lanes of a call end together; the first one tells of its items."""
        del self._streams[stream.call]
        facts = self._facts(stream.step, stream.taken, stream.call)
        if self._detailed:
            facts |= {"taken": stream.log_taken, "pieces": stream.log_pieces}
        seconds = self.now - stream.began
        lanes = self.engine.calls[stream.call].command.lanes
        for lane in lanes:
            self._spend(lane, stream.node, "call", stream.began, seconds, facts)
            facts = self._facts(stream.step, (), stream.call)
        for lane in lanes:
            self._play(lane, CallFinished(stream.call, lane))

    # --- what is no call of a stage ---------------------------------------------------------------

    def _finish(self, command: RunFinish, node: StageNode) -> None:
        begins = [self._take_lane(lane, command, (node.worker,)) for lane in command.lanes]
        seconds = self._timing.finish(node, command)
        for lane in command.lanes:
            facts = {"step": command.step, "minibatch": command.minibatch}
            end = self._spend(lane, node, "finish", max(begins), seconds, facts)
            self._end(lane, command.call, end)

    def _publish(
        self, command: ExportWeights | InstallWeights, lane: int, workers: tuple[str, ...]
    ) -> None:
        start = self._take_lane(lane, command, workers)
        end = self._free_at[lane] = start + self._timing.publish(command, lane)
        facts: dict[str, object] = {"version": command.version, "source": command.source}
        if isinstance(command, InstallWeights):
            facts |= {"what": "install", "local": command.local}
        else:
            facts["what"] = "export"
        self.record.spans.append(Span(lane, workers[-1], "publish", start, end, facts))
        self._end(lane, command.call, end)

    def _move(self, command: MoveState) -> None:
        """A move in turn with the lane's commands, or beside the call that has just begun."""
        lane, worker = command.lane, command.worker
        seconds = self._timing.move(worker, command.what, lane)
        if command.early:
            start = max(self._began[lane], self._side_free_at[lane])
            self._side_free_at[lane] = start + seconds
        else:
            start = self._start_of(lane, command, (worker,))
            self._free_at[lane] = start + seconds
        end = start + seconds
        if command.what == "onload":
            self._onloaded[lane, worker] = end
        size = self.plan.placements[worker].state_bytes
        at, change = (start, size) if command.what == "onload" else (end, -size)
        self._memory[lane].changes.append((at, change))
        facts = {"what": command.what, "early": command.early}
        self.record.spans.append(Span(lane, worker, "switch", start, end, facts))

    # --- lanes ------------------------------------------------------------------------------------

    def _start_of(self, lane: int, command: LaneCommand, workers: Iterable[str]) -> float:
        """When a lane comes to a command that needs these workers: it waits for early onloads."""
        ready = (self._onloaded.get((lane, worker), 0.0) for worker in workers)
        return max(self._sent_at + self._timing.dispatch(command), self._free_at[lane], *ready)

    def _take_lane(
        self,
        lane: int,
        command: RunCall | RunFinish | ExportWeights | InstallWeights,
        workers: Iterable[str],
    ) -> float:
        """A lane is at work on a call from now on; when it comes to it."""
        assert lane not in self._running, f"lane {lane} was given a call while it ran another"
        self._running[lane] = command.call
        start = self._began[lane] = self._start_of(lane, command, workers)
        return start

    def _spend(
        self,
        lane: int,
        node: StageNode,
        kind: SpanKind,
        start: float,
        seconds: float,
        facts: Mapping[str, object],
    ) -> float:
        """Work on a stage, or on its `finish`, from a moment on; when that ends."""
        end = start + seconds
        self._free_at[lane] = max(self._free_at[lane], end)
        self.record.spans.append(Span(lane, node.name, kind, start, end, facts))
        if lane in self._memory:
            room = self.plan.placements[node.worker].working_bytes
            self._memory[lane].calls.append((start, end, room))
        return end

    def _end(self, lane: int, call: int, when: float, *produced: ItemsProduced) -> None:
        self._at(when, lane, *produced, CallFinished(call, lane))

    def _at(self, when: float, lane: int, *events: Event) -> None:
        order = self.tie_break(), next(self._sequence)
        heappush(self._events, (when, *order, lane, events))

    def _facts(self, step: int, items: Sequence[int], call: int | None = None) -> dict[str, object]:
        """What the span of a call says."""
        facts: dict[str, object] = {"step": step, "items": len(items)}
        if self._detailed:
            facts["ids"] = ids_text(items)
            if call is not None:
                facts["call"] = call
        return facts

    # --- items ------------------------------------------------------------------------------------

    def _bring(self, node: StageNode, step: int, lane: int, inputs: Inputs, start: float) -> float:
        """Bring items to a lane that lie on others; when all are there.

        A lane does this before its call, not beside the one before.
        """
        if not self._timing.has_links:
            return start
        end, items = start, 0
        for transfer in self._items.transfers(node, step, lane, inputs):
            end += self._timing.transfer(transfer)
            items += len(transfer.items)
        if items:
            facts = {"step": step, "items": items}
            self.record.spans.append(Span(lane, "items", "transfer", start, end, facts))
            self._free_at[lane] = max(self._free_at[lane], end)
        return end

    def _complete(self, command: CompleteStep) -> None:
        self.record.step_ends[command.step] = self._sent_at
        for lag, items in command.staleness.items():
            self.record.staleness[lag] = self.record.staleness.get(lag, 0) + items
        self._items.forget(command.step)
