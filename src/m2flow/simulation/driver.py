"""The simulated driver: the engine under a virtual clock, with stage times from a cost model.

It plays the part of lanes exactly as far as the engine can see them. What lies on another lane is
brought to the reading one before its call, as real lanes do it. Tests and the planner stand on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from m2flow.engine.core import Engine
from m2flow.engine.messages import (
    LAUNCHER,
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
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span, ids_text
from m2flow.errors import RunFailed
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode
from m2flow.simulation.lanes import VirtualLanes
from m2flow.simulation.stream import VirtualStream
from m2flow.simulation.timing import Timing


@dataclass(frozen=True, slots=True)
class _Next:
    """The next thing that happens in a streaming call, unless its ticket has changed."""

    stream: VirtualStream
    ticket: int


@dataclass(slots=True)
class _LoopClock:
    """How far a lane has come in a loop.

    Attributes:
        now: second that it has come to.
        ready: when what goes on elsewhere will have ended for the group that began there last.
        items: that group.
    """

    now: float
    ready: float = 0.0
    items: tuple[int, ...] = ()


@dataclass(slots=True)
class SimulatedRun:
    """What a simulation gives.

    Attributes:
        step_starts: virtual second at which each step was submitted.
        step_ends: virtual second at which each step was complete.
        spans: what each lane did.
        staleness: version lag to items.
        num_events: events the engine has handled.
        peak_bytes: for each lane with a memory limit, the most that resident states (from the start
            of an onload to the end of an offload) and the call at hand took together.
    """

    step_starts: dict[int, float] = field(default_factory=dict)
    step_ends: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    num_events: int = 0
    peak_bytes: dict[int, int] = field(default_factory=dict)


class Simulation:
    """Runs a plan in virtual time.

    Args:
        graph, plan: as for `Engine`.
        timing: how long things take.
        tie_break: a number by which simultaneous events are ordered, asked for once an event; by
            default they keep the order in which they were made.
        detailed: whether spans say which items they are of, as those of real lanes do.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        timing: Timing,
        tie_break: Callable[[], float] = lambda: 0.0,
        detailed: bool = False,
    ) -> None:
        self.graph, self.plan, self.tie_break = graph, plan, tie_break
        self._timing, self._detailed = timing, detailed
        self.engine = Engine(graph, plan)
        self.now = 0.0
        self._sent_at = 0.0  # when the commands at hand leave the controller
        self._sequence = count()
        self._events: list[tuple[float, float, int, int, tuple[Event, ...] | _Next]] = []
        self._lanes = VirtualLanes(plan, timing)
        self._streams: dict[int, VirtualStream] = {}
        self.record = SimulatedRun(spans=self._lanes.spans)

    def run(self, num_items: int, num_steps: int) -> SimulatedRun:
        """Play steps of `num_items` source items, as many at once as the staleness allows.

        Raises:
            RunFailed: the engine stopped the run.
        """
        submitted = 0
        while len(self.record.step_ends) < num_steps:
            in_flight = submitted - len(self.record.step_ends)
            if submitted < num_steps and in_flight <= self.plan.max_staleness:
                lengths = self._lengths(SOURCE, submitted, range(num_items))
                self.record.step_starts[submitted] = self.now
                self._handle(StepSubmitted(submitted, num_items, lengths))
                submitted += 1
                continue
            when, _, _, lane, news = heappop(self._events)
            if isinstance(news, _Next) and news.ticket != news.stream.ticket:
                continue
            self.now = when
            if isinstance(news, _Next):
                self._handle(Tick(when))
                self._advance(news.stream)
            else:
                self._report(lane, Tick(when), *news)
        self.record.peak_bytes = self._lanes.peak_bytes()
        return self.record

    def _lengths(self, producer: int, step: int, items: Sequence[int]) -> tuple[float, ...]:
        if self.graph.length_column(producer) is None:
            return ()
        return tuple(self._timing.said_length(producer, step, item) for item in items)

    def _report(self, lane: int, *events: Event) -> None:
        """What a lane says at one moment."""
        for event in events:
            if isinstance(event, CallFinished):
                self._lanes.end(lane, event.call)
        self._handle(*events)

    def _report_at(self, when: float, lane: int, *events: Event) -> None:
        order = self.tie_break(), next(self._sequence)
        heappush(self._events, (when, *order, lane, events))

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
                    self._publish(command, lane, source)
            case InstallWeights(target=target, lanes=(lane,)):
                self._publish(command, lane, target)
            case MoveState():
                self._lanes.move(command, self._sent_at)
            case CompleteStep():
                self._complete(command)
            case FailRun(message=message, cause=cause):
                raise RunFailed(message) from cause

    # --- calls ------------------------------------------------------------------------------------

    def _run_call(self, command: RunCall, node: StageNode) -> None:
        shares = [_items_of(inputs) for inputs in command.inputs]
        start = 0.0
        for lane, inputs in zip(command.lanes, command.inputs, strict=True):
            begin = self._lanes.begin(lane, command, self._sent_at)
            start = max(start, self._bring(command.step, lane, inputs, begin))
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
            outputs = _outputs_of(node, items)
            leaving: list[int] = []
            if node.loop is not None:
                leaving = [i for i in outputs if self._timing.leaves(node, step, i)]
            produced = self._produced(command, node, lane, outputs, leaving)
            facts = self._facts(step, items, command.call)
            end = self._lanes.spend(lane, node, "call", start, seconds, facts)
            self._report_at(end, lane, produced, CallFinished(command.call, lane))

    def _run_loop(
        self, command: RunCall, first: StageNode, items: list[int], lane: int, now: float
    ) -> None:
        """Go around a loop on one lane: each member's call costs what it costs outside of it.

        Groups take turns where a stage waits. What goes on elsewhere takes as long for several of
        them together as the stage takes for all of their items.
        """
        clock, pieces = _LoopClock(now), {now: list[ItemsProduced]()}
        count = -(-len(items) // (command.group or len(items) or 1))
        groups = deque(
            self._send_around(command, first, items[n::count], lane, clock, pieces)
            for n in range(count)
        )
        while groups:
            if next(groups[0], "left") == "left":
                groups.popleft()
            else:
                groups.rotate(-1)
        last = pieces.pop(clock.now)
        for when, some in pieces.items():
            self._report_at(when, lane, *some)
        self._report_at(clock.now, lane, *last, CallFinished(command.call, lane))

    def _send_around(
        self,
        command: RunCall,
        first: StageNode,
        items: list[int],
        lane: int,
        clock: _LoopClock,
        pieces: dict[float, list[ItemsProduced]],
    ) -> Iterator[None]:
        """One group's way around a loop; None where another may have its turn."""
        assert first.loop is not None
        spec = self.graph.loops[first.loop]
        turn, step = 0, command.step
        while items:
            turn += 1
            for index in spec.members:
                node = self.graph.nodes[index]
                begun = clock.now
                seconds = self._timing.call(node, step, (lane,), (items,))
                share = self._timing.elsewhere(node, lane)
                if share:
                    ready = begun + share * seconds
                    if clock.ready > begun:  # it still is at work for another group
                        both = self._timing.call(node, step, (lane,), ((*clock.items, *items),))
                        more = both - self._timing.call(node, step, (lane,), (clock.items,))
                        ready = max(ready, clock.ready + share * more)
                    clock.ready, clock.items = ready, tuple(items)
                    yield
                    clock.now = max(clock.now, ready)
                    seconds += clock.now - begun - share * seconds
                facts = self._facts(step, items)
                clock.now = self._lanes.spend(lane, node, "call", begun, seconds, facts)
                gone = [i for i in items if self._timing.leaves(node, step, i)]
                if index == spec.members[-1] and turn == spec.max_turns:
                    gone = items
                if gone:
                    piece = self._produced(command, node, lane, gone, gone)
                    pieces.setdefault(clock.now, []).append(piece)
                    left = set(gone)
                    items = [item for item in items if item not in left]
                if not items:
                    break
            if clock.now - next(reversed(pieces)) > self.plan.deadline_seconds / 2:
                pieces[clock.now] = [self._produced(command, first, lane, [], [])]  # still alive

    def _produced(
        self, command: RunCall, node: StageNode, lane: int, outputs: list[int], leaving: list[int]
    ) -> ItemsProduced:
        size = self._timing.item_bytes(node) * len(outputs)
        index = node.index if node.loop is None else self.graph.loops[node.loop].members[-1]
        lengths = self._lengths(index, command.step, outputs)
        return ItemsProduced(command.call, lane, tuple(outputs), size, tuple(leaving), lengths)

    # --- streaming calls --------------------------------------------------------------------------

    def _feed(self, command: FeedCall) -> None:
        stream = self._streams.get(command.call)
        if stream is None:  # it has run dry: the items are given back when its end is told
            return
        start = max(self.now, stream.began)  # not before the call begins
        ready = max(
            self._bring(stream.step, lane, inputs, start)
            for lane, inputs in zip(command.lanes, command.inputs, strict=True)
        )
        self._stream(stream, _items_of(command.inputs[0]), start, ready - start)

    def _stream(
        self, stream: VirtualStream, items: list[int], start: float, wait: float = 0.0
    ) -> None:
        """Give items to a streaming call, which waits until they are there."""
        node = stream.node
        admitted = self._timing.admit(node, stream.step, stream.lane, items)
        outputs = _outputs_of(node, items)
        stream.take(start, items, outputs, admitted.needs, admitted.pause + wait)
        if self._detailed:
            stream.log_taken.append([start - stream.began, ids_text(items)])
        self._set_down(stream)

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
        stream.finish_next(self.now)
        finished, running = len(stream.unsaid), stream.running
        said: tuple[int, ...] = ()
        if not running or self._timing.hands_on(stream.node, finished, running):
            said = stream.say()
        self._set_down(stream)
        if said:
            if self._detailed:
                stream.log_pieces.append([self.now - stream.began, ids_text(said), []])
            size = self._timing.item_bytes(stream.node) * len(said)
            lengths = self._lengths(stream.node.index, stream.step, said)
            event = ItemsProduced(stream.call, stream.lane, said, size, lengths=lengths)
            self._report(stream.lane, event)

    def _end_stream(self, stream: VirtualStream) -> None:
        """All lanes of a call end together; the first one tells of its items."""
        del self._streams[stream.call]
        facts = self._facts(stream.step, stream.taken, stream.call)
        if self._detailed:
            facts |= {"taken": stream.log_taken, "pieces": stream.log_pieces}
        seconds = self.now - stream.began
        lanes = self.engine.calls[stream.call].command.lanes
        for lane in lanes:
            self._lanes.spend(lane, stream.node, "call", stream.began, seconds, facts)
            facts = self._facts(stream.step, (), stream.call)
        for lane in lanes:
            self._report(lane, CallFinished(stream.call, lane))

    # --- what is no call of a stage ---------------------------------------------------------------

    def _finish(self, command: RunFinish, node: StageNode) -> None:
        begins = [self._lanes.begin(lane, command, self._sent_at) for lane in command.lanes]
        seconds = self._timing.finish(node, command)
        facts = {"step": command.step, "minibatch": command.minibatch}
        for lane in command.lanes:
            end = self._lanes.spend(lane, node, "finish", max(begins), seconds, facts)
            self._report_at(end, lane, CallFinished(command.call, lane))

    def _publish(self, command: ExportWeights | InstallWeights, lane: int, worker: str) -> None:
        start = self._lanes.begin(lane, command, self._sent_at)
        end = start + self._timing.publish(command, lane)
        facts: dict[str, object] = {"version": command.version, "source": command.source}
        if isinstance(command, InstallWeights):
            facts |= {"what": "install", "local": command.local}
        else:
            facts["what"] = "export"
        self._lanes.busy(Span(lane, worker, "publish", start, end, facts))
        self._report_at(end, lane, CallFinished(command.call, lane))

    # --- items ------------------------------------------------------------------------------------

    def _facts(self, step: int, items: Sequence[int], call: int | None = None) -> dict[str, object]:
        """What the span of a call says."""
        facts: dict[str, object] = {"step": step, "items": len(items)}
        if self._detailed:
            facts["ids"] = ids_text(items)
            if call is not None:
                facts["call"] = call
        return facts

    def _bring(self, step: int, lane: int, inputs: Inputs, start: float) -> float:
        """Bring items to a lane that lie on others; when all are there.

        A lane does this before its call, not beside the one before. Source items have come along
        with the command.
        """
        if not self._timing.has_links:
            return start
        end, items = start, 0
        for part in (part for parts in inputs for part in parts):
            if part.lane not in (lane, LAUNCHER):
                end += self._timing.transfer(part.producer, part.lane, lane, len(part.items))
                items += len(part.items)
        if items:
            facts = {"step": step, "items": items}
            self._lanes.busy(Span(lane, "items", "transfer", start, end, facts))
        return end

    def _complete(self, command: CompleteStep) -> None:
        self.record.step_ends[command.step] = self._sent_at
        for lag, items in command.staleness.items():
            self.record.staleness[lag] = self.record.staleness.get(lag, 0) + items


def _items_of(inputs: Inputs) -> list[int]:
    """The items of a call on one lane."""
    return sorted(item for part in inputs[0] for item in part.items)


def _outputs_of(node: StageNode, items: Sequence[int]) -> list[int]:
    return [item * node.expands + k for item in items for k in range(node.expands)]
