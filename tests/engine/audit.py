"""An independent book-keeper for a simulated run.

It reads the events that went into an engine and the commands that came out, keeps books of its own
(with no thought of speed), and asserts what the engine promises: every item worked on exactly once,
inputs that are there, mini-batches by item index, memory and edge limits, fresh weights, releases.
It shares no code with the engine, only the messages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
)
from m2flow.engine.plan import StagePlan
from m2flow.engine.turns import whole_step_edges
from m2flow.flow import SOURCE, StageNode
from m2flow.plan import validate
from m2flow.simulation.driver import SimulatedRun, Simulation
from tests.engine.random_cases import Case, SeededCosts, unit_items

Log = list[tuple[tuple[Event, ...], list[Command]]]


def simulate(case: Case) -> tuple[Simulation, SeededCosts, Log, SimulatedRun]:
    """Play a case, writing down all events and their commands."""
    import random

    costs = case.costs()
    ties = random.Random(case.seed)
    simulation = Simulation(case.graph, case.plan, costs, tie_break=ties.random)
    log: Log = []
    handle = simulation.engine.handle

    def recorded(*events: Event) -> list[Command]:
        commands = list(handle(*events))
        log.append((events, commands))
        return commands

    simulation.engine.handle = recorded  # type: ignore[method-assign]
    return simulation, costs, log, simulation.run(case.num_items, case.num_steps)


@dataclass
class _Call:
    """A call in the books: `running` lanes, `items` it took and has not handed on."""

    command: Any
    running: set[int]
    items: set[int] = field(default_factory=set)
    """Input items of the call that are not done."""
    open_outputs: set[int] = field(default_factory=set)
    fetched: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Input item to (producer, lane) for each lane that has read it."""


class Books:
    """What the book-keeper knows; `read` takes one event and its commands."""

    def __init__(self, case: Case) -> None:
        self.case, self.graph, self.plan = case, case.graph, case.plan
        nodes = self.graph.nodes
        self.calls: dict[int, _Call] = {}
        self.lane_runs: dict[int, int] = {}
        self.resident: dict[int, set[str]] = {lane.id: set() for lane in self.plan.lanes}
        self.version: dict[tuple[str, str, int], int] = {
            (edge.source, edge.target, lane): 0
            for edge in self.graph.weight_edges
            for lane in self.plan.placements[edge.target].lanes
        }
        self.exported: dict[tuple[str, int], bool] = {}
        self.steps: set[int] = set()
        self.completed: list[int] = []
        self.staleness: Counter[tuple[int, int]] = Counter()
        self.there: dict[tuple[int, int], set[int]] = {}
        """(step, producer) to payloads that exist: made and not released."""
        self.at: dict[tuple[int, int, int], set[int]] = {}
        """(step, producer, item) to the lanes that hold the payload."""
        self.released: dict[tuple[int, int], set[int]] = {}
        self.leased: dict[tuple[int, int], set[int]] = {}
        """(step, node) to input items with a call."""
        self.made: dict[tuple[int, int], set[int]] = {}
        """(step, node) to output items made so far, for stages in no loop."""
        self.done: dict[tuple[int, int], set[int]] = {}
        """(step, node) to input items that are done (in a loop: that have left it)."""
        self.inside: dict[tuple[int, int], set[int]] = {}
        """(step, loop) to items that have entered and not left."""
        self.finished: dict[tuple[int, int], int] = {}
        """(step, node) to mini-batches whose `finish` has ended."""
        self.finishing: set[tuple[int, int]] = set()
        self.home: dict[tuple[int, str, int], int] = {}
        self.turns: Counter[tuple[int, int, int]] = Counter()
        self.work: Counter[tuple[int, int, int]] = Counter()
        self.largest: dict[int, int] = {node.index: 0 for node in nodes}
        self.lengths: dict[tuple[int, int, int], float] = {}
        """(step, producer, item) to what was said of its length."""
        self.fused: set[int] = set()
        """Loops that a call has run fused."""
        limits = {
            (a, b): self.plan.edges[self.graph.edge_name(a, b)]
            for a, b in self.graph.edges
            if a != SOURCE and self.graph.edge_name(a, b) in self.plan.edges
        }
        self.whole = whole_step_edges(self.graph, limits, case.num_items)
        self.readers = {n: [m for m in nodes if n in m.inputs] for n in range(SOURCE, len(nodes))}

    # --- events -------------------------------------------------------------------------------

    def read(self, events: tuple[Event, ...], commands: list[Command]) -> None:
        for event in events:
            match event:
                case StepSubmitted(step=step, num_items=num_items):
                    self.steps.add(step)
                    self.there[step, SOURCE] = set(range(num_items))
                    for item in range(num_items):
                        self.at[step, SOURCE, item] = {LAUNCHER}
                    for item, length in zip(range(num_items), event.lengths, strict=False):
                        self.lengths[step, SOURCE, item] = length
                case ItemsProduced():
                    self._produced(event)
                case CallFinished():
                    self._finished(event)
        for command in commands:
            self._command(command)
        self._check_edges()
        self._check_memory()

    def _produced(self, event: ItemsProduced) -> None:
        call = self.calls[event.call]
        command = call.command
        node, step = self.graph.nodes[command.node], command.step
        assert set(event.items) <= call.open_outputs
        call.open_outputs -= set(event.items)
        assert event.lane in command.lanes
        for item in event.items:
            self.at.setdefault((step, node.index, item), set()).add(event.lane)
        if node.loop is None:
            made = self.made.setdefault((step, node.index), set())
            assert not made & set(event.items), "made twice"
            made.update(event.items)
        self.there.setdefault((step, node.index), set()).update(event.items)
        if event.items:
            self.largest[node.index] = max(
                self.largest[node.index], -(-event.num_bytes // len(event.items))
            )
        stream = node.index if node.loop is None else self.graph.loops[node.loop].members[-1]
        for item, length in zip(event.items, event.lengths, strict=False):
            self.lengths[step, stream, item] = length
        if command.fused:
            assert node.loop is not None
            assert event.leaving == event.items, "only what leaves comes out of a fused loop"
            for item in event.items:
                self._item_done(step, node, item, call)
                self.inside[step, node.loop].remove(item)
                for member in self.graph.loops[node.loop].members:
                    self.done.setdefault((step, member), set()).add(item)
        elif node.loop is not None:
            spec = self.graph.loops[node.loop]
            for item in event.items:
                self._item_done(step, node, item, call)
                if node.index == spec.members[-1]:
                    self.turns[step, node.loop, item] += 1
                turns = self.turns[step, node.loop, item]
                at_the_end = node.index == spec.members[-1] and turns == spec.max_turns
                if item in event.leaving or at_the_end:
                    self.inside[step, node.loop].remove(item)
                    for member in spec.members:
                        self.done.setdefault((step, member), set()).add(item)
        if node.streaming:
            outputs = call.open_outputs
            for item in {output // node.expands for output in event.items}:
                if not any(item * node.expands + k in outputs for k in range(node.expands)):
                    self._item_done(step, node, item, call)

    def _item_done(self, step: int, node: StageNode, item: int, call: _Call) -> None:
        call.items.remove(item)
        for producer, lane in call.fetched.pop(item):
            self.at[step, producer, item].add(lane)
        if node.loop is None:
            self.done.setdefault((step, node.index), set()).add(item)
        else:
            self.leased[step, node.index].remove(item)

    def _finished(self, event: CallFinished) -> None:
        call = self.calls[event.call]
        call.running.remove(event.lane)
        if call.running:
            return
        del self.calls[event.call]
        for lane in call.command.lanes:
            assert self.lane_runs.pop(lane) == event.call
        match call.command:
            case RunCall(node=index, step=step):
                node = self.graph.nodes[index]
                for item in sorted(call.items):
                    if node.streaming:  # fed too late: it was never started
                        outputs = {item * node.expands + k for k in range(node.expands)}
                        assert outputs <= call.open_outputs
                        self.leased[step, index].remove(item)
                        self.work[step, index, item] -= 1
                        del call.fetched[item]
                    else:
                        self._item_done(step, node, item, call)
            case RunFinish(node=index, step=step):
                self.finished[step, index] = self.finished.get((step, index), 0) + 1
                self.finishing.remove((step, index))
            case ExportWeights(source=source, version=version):
                self.exported[source, version] = True
            case InstallWeights(source=source, target=target, version=version, lanes=(lane,)):
                assert version > self.version[source, target, lane], "versions must grow"
                self.version[source, target, lane] = version

    # --- commands -----------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        match command:
            case RunCall():
                self._start(command)
                self._run_call(command)
            case FeedCall():
                self._feed(command)
            case RunFinish():
                self._start(command)
                self._run_finish(command)
            case ExportWeights(source=source, lanes=lanes):
                self._start(command)
                self._check_settled(source, command.version - 1)
                assert lanes == self.plan.placements[source].replicas[0], "a whole replica"
                for lane in lanes:
                    self._check_resident(source, lane)
            case InstallWeights(source=source, target=target, lanes=(lane,)):
                self._start(command)
                self._check_resident(target, lane)
                if command.local:
                    assert (lane,) in self.plan.placements[source].replicas
                    self._check_settled(source, command.version - 1)
                    self._check_resident(source, lane)
                else:
                    assert self.exported[source, command.version]
            case MoveState(what=what, worker=worker, lane=lane):
                assert lane not in self.lane_runs
                assert self.plan.placements[worker].state_bytes or what == "onload"
                self._move(worker, what, lane)
            case ReleaseItems():
                self._release(command)
            case CompleteStep():
                self._complete(command)
            case FailRun(message=message):
                raise AssertionError(message)

    def _move(self, worker: str, what: str, lane: int) -> None:
        assert (worker in self.resident[lane]) == (what == "offload")
        self.resident[lane] ^= {worker}
        self._check_memory()

    def _release(self, command: ReleaseItems) -> None:
        """Each lane that holds the items lets them go; an item of a loop may be made anew."""
        step, producer, items = command.step, command.producer, command.items
        there = self.there[step, producer]
        assert set(items) <= there, "released what is not there"
        assert len(set(items)) == len(items)
        assert command.lanes
        for item in items:
            at = self.at[step, producer, item]
            assert at >= set(command.lanes), f"{item} of {producer} is not there: {at}"
            at -= set(command.lanes)
            if producer == SOURCE or not at:
                there.remove(item)

    def _workers_of(self, command: Any) -> list[str]:
        nodes = [self.graph.nodes[command.node]]
        if isinstance(command, RunCall) and command.fused:
            assert nodes[0].loop is not None
            nodes = [self.graph.nodes[n] for n in self.graph.loops[nodes[0].loop].members]
        return [node.worker for node in nodes]

    def _start(self, command: Any) -> None:
        """A lane runs one call at a time."""
        assert command.call not in self.calls
        for lane in command.lanes:
            assert lane not in self.lane_runs, f"lane {lane} runs two calls"
            self.lane_runs[lane] = command.call
        self.calls[command.call] = _Call(command, set(command.lanes))

    def _check_resident(self, worker: str, lane: int) -> None:
        limit = next(spec.memory_bytes for spec in self.plan.lanes if spec.id == lane)
        stateless = any(node.is_function and node.worker == worker for node in self.graph.nodes)
        if limit is not None and (self.plan.placements[worker].state_bytes or not stateless):
            assert worker in self.resident[lane], f"{worker} is not resident on lane {lane}"

    def _check_memory(self) -> None:
        for lane in self.plan.lanes:
            used = sum(self.plan.placements[w].state_bytes for w in self.resident[lane.id])
            if lane.id in self.lane_runs:
                command = self.calls[self.lane_runs[lane.id]].command
                if isinstance(command, RunCall | RunFinish):
                    spots = [self.plan.placements[w] for w in self._workers_of(command)]
                    used += max(spot.working_bytes for spot in spots)
            assert lane.memory_bytes is None or used <= lane.memory_bytes

    def _items_of(self, step: int, lane: int, inputs: Inputs, call: _Call) -> list[int]:
        """The items of a call on a lane, which every one of its input streams must hold.

        Each is read from a lane that has it, from the reading lane itself if that has it.
        """
        streams = []
        for parts in inputs:
            for part in parts:
                there = self.there.get((step, part.producer), set())
                assert set(part.items) <= there, f"not there: {set(part.items) - there}"
                for item in part.items:
                    at = self.at[step, part.producer, item]
                    assert part.lane in at, f"{item} of {part.producer} is on {at}"
                    assert part.lane == lane or lane not in at, "it is there already"
                    call.fetched.setdefault(item, []).append((part.producer, lane))
            items = [item for part in parts for item in part.items]
            assert len(set(items)) == len(items)
            streams.append(sorted(items))
        assert all(items == streams[0] for items in streams)
        return streams[0]

    def _run_call(self, command: RunCall) -> None:
        node, step = self.graph.nodes[command.node], command.step
        assert command.lanes in self.plan.placements[node.worker].replicas
        call = self.calls[command.call]
        shares = [
            self._items_of(step, lane, inputs, call)
            for lane, inputs in zip(command.lanes, command.inputs, strict=True)
        ]
        if node.streaming:  # all lanes of a gang work on each item together
            assert all(share == shares[0] for share in shares)
            del shares[1:]
        items = [item for share in shares for item in share]
        size = unit_items(node, self.case.num_items)
        for share in shares:  # whole units only
            assert {i // size for i in share} == {
                share[k] // size for k in range(0, len(share), size)
            }
            assert len(share) % size == 0
        chunk = self.plan.stages.get(node.name, StagePlan()).chunk
        assert items
        assert chunk is None or len(items) <= chunk * size
        members = [node]
        if command.fused:
            members = self._check_fused(command, node)
        for lane in command.lanes:
            for member in members:
                self._check_resident(member.worker, lane)
        self._check_longest_first(node, step, items)
        self._lease(node, step, command.lanes, items, call)
        for member in members:
            if member is not node:
                self._check_fresh(member, step, command.lanes, items)
                self._check_windows(member, step, items)
            for lane, share in zip(command.lanes, shares, strict=not node.streaming):
                self._check_homes(member, step, lane, share)

    def _check_fused(self, command: RunCall, node: StageNode) -> list[StageNode]:
        """All members of the loop stand on the lane; the first one takes the items."""
        assert self.plan.fuse_loops
        assert node.loop is not None
        self.fused.add(node.loop)
        members = [self.graph.nodes[index] for index in self.graph.loops[node.loop].members]
        assert members[0] is node
        for member in members:
            assert command.lanes in self.plan.placements[member.worker].replicas
        return members

    def _check_longest_first(self, node: StageNode, step: int, items: list[int]) -> None:
        """Of those that were ready and that an edge had room for, no longer one was left."""
        if node.length is None or node.sticky or node.by_arrival:
            return
        size = unit_items(node, self.case.num_items)
        window = self.case.num_items * node.fanout // node.minibatches
        taken = {item // size for item in items}
        leased = {item // size for item in self.leased.get((step, node.index), set())}
        first = items[0] // window
        ready = [
            unit
            for unit in range(max(taken) + 1)  # an edge admits by index: at least up to here
            if unit not in taken | leased
            and unit * size // window == first
            and all(self._arrived(node, step, i) for i in range(unit * size, (unit + 1) * size))
        ]
        shortest = min(self._unit_length(node, step, unit, size) for unit in taken)
        for unit in ready:
            assert self._unit_length(node, step, unit, size) <= shortest, f"{unit} is longer"

    def _arrived(self, node: StageNode, step: int, item: int) -> bool:
        return all(
            any(
                item in self.there.get((step, producer), set())
                for producer in self._producers_of(stream)
            )
            for stream in node.inputs
        )

    def _producers_of(self, stream: int) -> tuple[int, ...]:
        loop = None if stream == SOURCE else self.graph.nodes[stream].loop
        return (stream,) if loop is None else ()

    def _unit_length(self, node: StageNode, step: int, unit: int, size: int) -> float:
        return sum(
            self.lengths.get((step, stream, item), 0.0)
            for stream in node.inputs
            if self.graph.length_column(stream) == node.length
            for item in range(unit * size, (unit + 1) * size)
        )

    def _feed(self, command: FeedCall) -> None:
        node, call = self.graph.nodes[command.node], self.calls[command.call]
        assert node.streaming
        assert set(command.lanes) == call.running == set(call.command.lanes)
        assert call.command.step == command.step
        assert call.command.node == command.node
        shares = [
            self._items_of(command.step, lane, inputs, call)
            for lane, inputs in zip(command.lanes, command.inputs, strict=True)
        ]
        items = shares[0]
        assert items
        assert all(share == items for share in shares)
        self._lease(node, command.step, command.lanes, items, call)
        self._check_homes(node, command.step, command.lanes[0], items)

    def _check_homes(self, node: StageNode, step: int, lane: int, items: list[int]) -> None:
        """A sticky item goes where an earlier sticky stage left its state, or its ancestor's."""
        if not node.sticky:
            return
        for item in items:
            for earlier in self.graph.nodes:
                if not earlier.sticky or earlier.worker != node.worker:
                    continue
                upstream = self.graph.nodes[earlier.index] in self._upstream(node)
                if upstream or earlier.fanout == node.fanout:
                    ancestor = item // (node.fanout // earlier.fanout)
                    home = self.home.get((step, earlier.name, ancestor), lane)
                    assert home == lane, f"{node.name}: item {item} belongs on lane {home}"
            self.home[step, node.name, item] = lane

    def _upstream(self, node: StageNode) -> list[StageNode]:
        found = [self.graph.nodes[index] for index in node.inputs if index != SOURCE]
        for other in found:  # grows while it is read
            found += [
                self.graph.nodes[index]
                for index in other.inputs
                if index != SOURCE and self.graph.nodes[index] not in found
            ]
        return found

    def _lease(
        self, node: StageNode, step: int, lanes: tuple[int, ...], items: list[int], call: _Call
    ) -> None:
        assert step in self.steps
        leased = self.leased.setdefault((step, node.index), set())
        assert not set(items) & leased, f"{node.name} takes items twice"
        leased |= set(items)
        call.items |= set(items)
        for item in items:
            call.open_outputs |= {item * node.expands + k for k in range(node.expands)}
        for item in items:
            self.work[step, node.index, item] += 1
            if node.loop is not None:
                self.inside.setdefault((step, node.loop), set()).add(item)
        stage = self.plan.stages.get(node.name, StagePlan())
        limit = stage.max_running or stage.chunk
        if node.streaming and limit:
            assert len(call.items) <= limit
            assert len(call.open_outputs) <= limit * node.expands
        self._check_windows(node, step, items)
        self._check_fresh(node, step, lanes, items)

    def _check_fresh(
        self, node: StageNode, step: int, lanes: tuple[int, ...], items: list[int]
    ) -> None:
        for edge in self.graph.weight_edges:
            if edge.target == node.worker:
                lag = max(step - self.version[edge.source, edge.target, lane] for lane in lanes)
                assert lag <= self.plan.max_staleness, f"{node.name} runs on stale weights"
                assert lag >= 0, f"{node.name} runs on weights of the future"
        lags = [
            step - self.version[e.source, e.target, lane]
            for e in self.graph.weight_edges
            if e.target == node.worker
            for lane in lanes
        ]
        if lags:
            self.staleness[step, max(lags)] += len(items)

    def _check_windows(self, node: StageNode, step: int, items: list[int]) -> None:
        """Mini-batches by item index, or by arrival, one after the other, from step to step too."""
        total = self.case.num_items * node.fanout
        window_items = total // node.minibatches
        if node.by_arrival:
            begun = len(self.leased.get((step, node.index), set()) | set(items))
            self._check_window_over(node, step, (begun - 1) // window_items)
        else:
            for window in {item // window_items for item in items}:
                self._check_window_over(node, step, window)
        assert not (node.accumulates and (step, node.index) in self.finishing)
        if self._learns(node.worker):
            for earlier in self.steps:
                if earlier < step:
                    for other in self._stages(node.worker):
                        self._check_window_over(other, earlier, other.minibatches)
            for other in self._stages(node.worker):
                folds = other.accumulates or (node.accumulates and not node.has_finish)
                if other.index < node.index and folds:
                    self._check_window_over(other, step, other.minibatches)

    def _stages(self, worker: str) -> list[StageNode]:
        return [node for node in self.graph.nodes if node.worker == worker]

    def _learns(self, worker: str) -> bool:
        folds = any(node.accumulates for node in self._stages(worker))
        return folds or any(edge.source == worker for edge in self.graph.weight_edges)

    def _check_window_over(self, node: StageNode, step: int, window: int) -> None:
        """Everything of this stage and step before a window has been folded in and finished."""
        size = self.case.num_items * node.fanout // node.minibatches
        done = self.done.get((step, node.index), set())
        if node.by_arrival:
            assert len(done) >= window * size, f"{node.name} (step {step}): not full"
        else:
            missing = set(range(window * size)) - done
            assert not missing, f"{node.name} (step {step}): {missing} are of an earlier mini-batch"
        if node.has_finish:
            assert self.finished.get((step, node.index), 0) >= window

    def _run_finish(self, command: RunFinish) -> None:
        node, step = self.graph.nodes[command.node], command.step
        assert node.has_finish
        assert command.lanes == self.plan.placements[node.worker].lanes
        assert command.minibatch == self.finished.get((step, node.index), 0)
        self.finishing.add((step, node.index))
        size = self.case.num_items * node.fanout // node.minibatches
        if node.by_arrival:
            leased, done = self.leased[step, node.index], self.done[step, node.index]
            assert len(done) == (command.minibatch + 1) * size == len(done | leased)
        wanted = set(range(command.minibatch * size, (command.minibatch + 1) * size))
        wanted = set() if node.by_arrival else wanted
        assert wanted <= self.done[step, node.index]
        assert wanted <= {
            i for i in self.leased[step, node.index] if i < (command.minibatch + 1) * size
        }
        for other in self._stages(node.worker):
            if other.index < node.index:  # nobody still reads the state that changes now
                self._check_window_over(other, step, other.minibatches)
        for lane in command.lanes:
            self._check_resident(node.worker, lane)

    def _check_settled(self, source: str, step: int) -> None:
        """Weights go out when the worker has done all of the step, and nothing of the next."""
        for node in self.graph.nodes:
            if node.worker == source:
                self._check_window_over(node, step, node.minibatches)
                later = [key for key in [*self.finished, *self.finishing] if key[1] == node.index]
                assert all(of <= step for of, _ in later), f"{source} has learnt from a later step"

    # --- limits -------------------------------------------------------------------------------

    def _check_edges(self) -> None:
        for producer, consumer in self.graph.edges:
            edge = self.plan.edges.get(self.graph.edge_name(producer, consumer))
            if edge is None or producer == SOURCE:
                continue
            maker, reader = self.graph.nodes[producer], self.graph.nodes[consumer]
            if maker.loop is not None and maker.loop == reader.loop:
                continue  # what goes around inside a loop has no limit of its own
            held = 0
            for step in self.steps:
                if maker.loop is None:
                    leased = self.leased.get((step, producer), set())
                    made = {i * maker.expands + k for i in leased for k in range(maker.expands)}
                    made |= self.made.get((step, producer), set())
                else:
                    members = self.graph.loops[maker.loop].members
                    made = set().union(*(self.done.get((step, m), set()) for m in members))
                    made |= self.inside.get((step, maker.loop), set())
                used = self.done.get((step, consumer), set())
                if reader.loop is not None:  # used when it has passed the loop's first member
                    used = {
                        i
                        for i in made
                        if self.work[step, consumer, i] and not self._at(step, consumer, i)
                    }
                held += len(made - used)
            if edge.max_items is not None:
                assert held <= edge.max_items, f"{maker.name}->{reader.name} holds {held}"
            if edge.max_bytes is not None:
                size = self.case.costs().item_bytes(maker)
                if maker.loop is not None:  # it is where items enter that their number is limited
                    members = self.graph.loops[maker.loop].members
                    sizes = [self.case.costs().item_bytes(self.graph.nodes[m]) for m in members]
                    size = min(sizes) if maker.loop in self.fused else sizes[0]
                assert held * size <= max(edge.max_bytes, self._oldest(producer, consumer) * size)

    def _oldest(self, producer: int, consumer: int) -> int:
        """Items that may be on an edge in any case: what the stages behind it need at once."""
        num_items, maker = self.case.num_items, self.graph.nodes[producer]
        if (producer, consumer) in self.whole:
            return num_items * self.graph.nodes[consumer].fanout
        behind = [self.graph.nodes[n] for n in self.graph.between(producer, consumer)]
        span = unit_items(maker, num_items) * maker.expands
        return max(span, *(unit_items(node, num_items) for node in behind))

    def _at(self, step: int, index: int, item: int) -> bool:
        """Whether a call of this stage is on the item's first turn."""
        first = self.work[step, index, item] == 1
        return first and any(
            call.command.node == index and call.command.step == step and item in call.items
            for call in self.calls.values()
            if isinstance(call.command, RunCall)
        )

    # --- the end of a step --------------------------------------------------------------------

    def _complete(self, command: CompleteStep) -> None:
        step = command.step
        assert step in self.steps
        assert command.version == step + 1
        assert not [
            c
            for c in self.calls.values()
            if c.command.__class__ is RunCall and c.command.step == step
        ]
        for node in self.graph.nodes:
            self._check_window_over(node, step, node.minibatches)
        for key, version in self.version.items():
            assert version >= step + 1, f"{key} has not got the weights of step {step}"
        counted = {lag: n for (s, lag), n in self.staleness.items() if s == step}
        assert dict(command.staleness) == counted
        outputs = set(self.graph.output_nodes)
        for (of_step, producer), items in self.there.items():
            if of_step == step and items:
                read = self.readers[producer] or producer in outputs
                inner = producer >= 0 and self.graph.nodes[producer].loop is not None
                assert producer in outputs or not read or inner, (
                    f"{len(items)} payloads of {producer} are still there"
                )
        total = self.case.num_items * self.graph.nodes[self.graph.output].fanout
        total *= self.graph.nodes[self.graph.output].expands
        kept = set().union(*(self.there.get((step, n), set()) for n in outputs))
        assert kept == set(range(total)), "the output of the step is not all there"
        collected = [(part.producer, item) for part in command.output for item in part.items]
        assert sorted(item for _, item in collected) == list(range(total))
        for part in command.output:
            assert all(part.lane in self.at[step, part.producer, item] for item in part.items)
        for key in [key for key in self.at if key[0] == step]:
            if self.at.pop(key) and key[1] != SOURCE:
                read = bool(self.readers[key[1]]) and self.graph.nodes[key[1]].loop is None
                assert not read or key[1] in outputs, f"a lane still holds {key}"
        for key in [key for key in self.there if key[0] == step]:
            del self.there[key]
        self.steps.remove(step)
        self.completed.append(step)


def audit(case: Case) -> Log:
    """Play a case and check all of it; its log."""
    validate(case.plan, case.graph, case.num_items)
    simulation, costs, log, record = simulate(case)
    books = Books(case)
    for events, commands in log:
        books.read(events, commands)
    assert books.completed == list(range(case.num_steps))
    assert not books.calls
    assert not books.steps
    assert not books.there
    for lane in case.plan.lanes:
        assert lane.memory_bytes is None or record.peak_bytes[lane.id] <= lane.memory_bytes
    _check_work(case, costs, books)
    assert not simulation.engine.steps
    assert not simulation.engine.calls
    return log


def _check_work(case: Case, costs: SeededCosts, books: Books) -> None:
    """Every stage has worked on every item once; in a loop, as often as the item's turns say."""
    for step in range(case.num_steps):
        for node in case.graph.nodes:
            for item in range(case.num_items * node.fanout):
                wanted = 1
                if node.loop is not None:
                    members = case.graph.loops[node.loop].members
                    visits = costs.planned_visits(node.loop, step, item)
                    if not case.graph.loops[node.loop].until:
                        visits = len(members) * (case.graph.loops[node.loop].max_turns or 0)
                    wanted = sum(members[k % len(members)] == node.index for k in range(visits))
                leases = wanted
                if node.loop in books.fused:  # one lease, of the first member, for all of its turns
                    leases = int(node.index == case.graph.loops[node.loop or 0].members[0])
                assert books.work[step, node.index, item] == leases
                assert costs.worked_on[node.index, step, item] == wanted
