"""`Engine`: the pure state machine that carries a Plan out.

`handle(event)` returns commands. There are no threads, clocks, sockets or tensors here, and no
randomness: the same events give the same commands. A call starts when all of this holds:

  1. *order*: its lanes are idle and no barrier holds them (`LaneBoard`);
  2. *admission*: the weights are fresh enough, and each edge that leads out has room (`Admission`);
  3. *chunking*: `chunk` units are ready, or all that are still to come are (`StageLedger`);
  4. *preference*: older steps first, then the plan's order of stages.

When nothing runs, a part of a chunk is started rather than wait: a run that can make progress does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import TypeAlias

from m2flow.engine.account import call_name, who_waits
from m2flow.engine.admission import Admission
from m2flow.engine.lanes import Barrier, LaneBoard
from m2flow.engine.ledger import ANYWHERE
from m2flow.engine.messages import (
    CallFailed,
    CallFinished,
    Command,
    CompleteStep,
    Event,
    ExportWeights,
    FailRun,
    FeedCall,
    InstallWeights,
    ItemsProduced,
    LaneLost,
    Part,
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.engine.plan import Plan, StagePlan
from m2flow.engine.residency import Residency
from m2flow.engine.steps import StepState
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode

CallCommand: TypeAlias = RunCall | RunFinish | ExportWeights | InstallWeights


@dataclass(slots=True)
class Call:
    """A call in progress.

    Attributes:
        running: lanes that have not finished their part.
        units: units of a stage leased to it (what a streaming call was started with).
        unfinished: for a streaming call, unit to the number of output items still to come.
    """

    command: CallCommand
    running: set[int]
    deadline: float
    step: int
    units: list[int] = field(default_factory=list)
    unfinished: dict[int, int] = field(default_factory=dict)


class Engine:
    """Carries out one plan for one graph, step after step.

    Args:
        graph: what is to be done.
        plan: how; it must fit the graph (`m2flow.plan.validate`).
        first_step: number of the first step that will be submitted; the weights that the workers
            were loaded with have this version.
    """

    def __init__(self, graph: FlowGraph, plan: Plan, first_step: int = 0) -> None:
        self.graph, self.plan = graph, plan
        self.now = 0.0
        self.failed = False
        self.steps: dict[int, StepState] = {}
        self.calls: dict[int, Call] = {}
        self._out: list[Command] = []
        self._next_call = 0
        self._deadlines: list[tuple[float, int]] = []
        self._replicas = {worker: plan.placements[worker].replicas for worker in graph.workers}
        self._board = LaneBoard([lane.id for lane in plan.lanes], self._replicas)
        self._residency = Residency(plan)
        self._admission = Admission(graph, plan, first_step)
        self._stage_plans = [plan.stages.get(node.name, StagePlan()) for node in graph.nodes]
        self._streaming: dict[tuple[int, int], list[int]] = {}
        self._wanted_gangs: set[tuple[int, int, int]] = set()
        self._woken: dict[tuple[int, int], None] = {}
        self._readers: dict[int, list[int]] = {n: [] for n in range(SOURCE, len(graph.nodes))}
        for node in graph.nodes:
            for stream in node.inputs:
                self._readers[stream].append(node.index)
        order = {name: place for place, name in enumerate(plan.order)}
        preferred = sorted(graph.nodes, key=lambda n: (order.get(n.name, len(order)), n.index))
        self._preference = {node.index: place for place, node in enumerate(preferred)}
        self._nodes_on_lane: dict[int, list[int]] = {lane.id: [] for lane in plan.lanes}
        for node in preferred:
            for lane in plan.placements[node.worker].lanes:
                self._nodes_on_lane[lane].append(node.index)

    def handle(self, event: Event) -> list[Command]:
        """Take one event in; the commands it leads to, in the order they are to be carried out."""
        if self.failed:
            return []
        self._out = []
        match event:
            case ItemsProduced():
                self._items_produced(event)
            case CallFinished():
                self._call_finished(event)
            case StepSubmitted():
                self._step_submitted(event)
            case CallFailed():
                name = call_name(self.graph, self.calls[event.call].command)
                self._fail(f"{name} failed on lane {event.lane}", event.error)
            case LaneLost():
                self._fail(f"lane {event.lane} was lost: {event.reason}")
            case Tick():
                self._tick(event.now)
        if not self.failed:
            self._start_what_can()
        return self._out

    # --- what events change -------------------------------------------------------------------

    def _step_submitted(self, event: StepSubmitted) -> None:
        assert event.step not in self.steps, f"step {event.step} was submitted twice"
        state = StepState(self.graph, event.step, event.num_items)
        self.steps[event.step] = state
        self._arrive(state, range(event.num_items), self._readers[SOURCE])

    def _arrive(
        self,
        state: StepState,
        items: Sequence[int],
        at: Sequence[int],
        lane: int = ANYWHERE,
    ) -> None:
        for consumer in at:
            state.ledgers[consumer].arrive(items, lane)
            self._wake(state.step, consumer)

    def _items_produced(self, event: ItemsProduced) -> None:
        call = self.calls[event.call]
        assert isinstance(call.command, RunCall)
        state, node = self.steps[call.step], self.graph.nodes[call.command.node]
        self._admission.observe_bytes(node.index, len(event.items), event.num_bytes)
        if node.loop is None:
            self._arrive(state, event.items, self._readers[node.index], call.command.lanes[0])
        else:
            self._go_around(state, node, event, call.command.lanes[0])
        if node.streaming:
            done = []
            for item in event.items:
                unit = item // node.expands
                call.unfinished[unit] -= 1
                if call.unfinished[unit] == 0:
                    del call.unfinished[unit]
                    done.append(unit)
            self._units_done(state, node, done)
            self._close_window(state, node)
            self._wake(call.step, node.index)

    def _go_around(
        self, state: StepState, node: StageNode, event: ItemsProduced, lane: int
    ) -> None:
        """Send items on to the next member of their loop, or out of it."""
        assert node.loop is not None
        spec, loop = self.graph.loops[node.loop], state.loops[node.loop]
        place = spec.members.index(node.index)
        at_the_end = place == len(spec.members) - 1
        leaving, staying = [], []
        asked_to_leave = set(event.leaving)
        self._release(state, state.moved_on(node, event.items))
        for item in event.items:
            loop.came_from[item] = node.index
            turn = loop.turns.get(item, 0) + at_the_end
            if item in asked_to_leave or (at_the_end and turn == spec.max_turns):
                loop.turns.pop(item, None)
                leaving.append(item)
            else:
                loop.turns[item] = turn
                staying.append(item)
        loop.left += len(leaving)
        outside = [c for c in self._readers[spec.members[-1]] if c not in spec.members]
        self._arrive(state, leaving, outside, lane)
        self._arrive(state, staying, [spec.members[(place + 1) % len(spec.members)]], lane)

    def _call_finished(self, event: CallFinished) -> None:
        call = self.calls[event.call]
        call.running.discard(event.lane)
        if call.running:
            return
        del self.calls[event.call]
        state = self.steps[call.step]
        state.active_calls -= 1
        for lane in call.command.lanes:
            self._free(lane)
        match call.command:
            case RunCall():
                self._stage_call_finished(event.call, call, self.graph.nodes[call.command.node])
            case RunFinish(node=index):
                state.finishing.discard(index)
                self._next_window(state, self.graph.nodes[index])
            case ExportWeights(source=source):
                self._ask_installs(state, source)
            case InstallWeights(target=target, version=version, lanes=lanes):
                self._admission.installed(target, lanes[0], version)
                state.installs -= 1
                for node in self.graph.nodes:
                    if node.worker == target:
                        self._wake_in_all_steps(node.index)
        if not (state.open_nodes or state.installs or state.active_calls):
            del self.steps[call.step]
            self._out.append(CompleteStep(call.step, call.step + 1, dict(state.staleness)))

    def _stage_call_finished(self, number: int, call: Call, node: StageNode) -> None:
        state = self.steps[call.step]
        if node.streaming:
            self._streaming[call.step, node.index].remove(number)
            for unit in call.unfinished:  # fed when the call had already run dry: never started
                state.ledgers[node.index].give_back(unit)
        else:
            self._units_done(state, node, call.units)
        members = (node.index,) if node.loop is None else self.graph.loops[node.loop].members
        for member in members:
            self._close_window(state, self.graph.nodes[member])
            self._wake(call.step, member)

    def _units_done(self, state: StepState, node: StageNode, units: Sequence[int]) -> None:
        """All outputs of units are there: inputs may go, and producers may have room again."""
        ledger = state.ledgers[node.index]
        if node.loop is None and units:
            items = [item for unit in units for item in ledger.items_of(unit)]
            self._release(state, state.consumed(node, items))
        ledger.finish(units)
        for producer in self._admission.bounded_producers(node.index):
            self._wake_in_all_steps(producer)

    def _release(self, state: StepState, parts: list[Part]) -> None:
        for part in parts:
            self._out.append(ReleaseItems(state.step, part.producer, part.items))

    def _close_window(self, state: StepState, node: StageNode) -> None:
        """Where a mini-batch (or the stage's step) is done, run `finish`, or go on."""
        ledger = state.ledgers[node.index]
        if not ledger.window_complete or node.index in state.finishing:
            return
        if node.has_finish:
            state.finishing.add(node.index)
            lanes = self.plan.placements[node.worker].lanes
            finish = RunFinish(0, node.index, state.step, ledger.window, lanes)
            self._board.ask(Barrier(lanes, state.step, node.index, command=finish))
        else:
            self._next_window(state, node)

    def _next_window(self, state: StepState, node: StageNode) -> None:
        """A window was closed; when a worker has done all of its step, its weights go out."""
        ledger = state.ledgers[node.index]
        ledger.next_window()
        self._wake(state.step, node.index)
        if ledger.complete and state.worker_done(node.worker):
            self._publish(state, node.worker)

    def _publish(self, state: StepState, source: str) -> None:
        targets = [edge.target for edge in self.graph.weight_edges if edge.source == source]
        lanes = [lane for target in targets for lane in self.plan.placements[target].lanes]
        state.installs += len(lanes)
        home = self.plan.placements[source].lanes
        if set(lanes) <= set(home):
            self._ask_installs(state, source)
        else:
            export = ExportWeights(0, source, state.step + 1, home[:1])
            self._board.ask(Barrier(home[:1], state.step, SOURCE, command=export))

    def _ask_installs(self, state: StepState, source: str) -> None:
        home, version = self.plan.placements[source].lanes, state.step + 1
        for edge in self.graph.weight_edges:
            if edge.source == source:
                for lane in self.plan.placements[edge.target].lanes:
                    install = InstallWeights(
                        0, source, edge.target, version, (lane,), local=lane in home
                    )
                    self._board.ask(Barrier((lane,), state.step, SOURCE, command=install))

    def _tick(self, now: float) -> None:
        self.now = now
        while self._deadlines:
            deadline, number = self._deadlines[0]
            call = self.calls.get(number)
            if call and deadline > now:
                return
            heappop(self._deadlines)
            if call:
                self._fail(
                    f"{call_name(self.graph, call.command)} has not finished within its deadline "
                    f"of {self.plan.deadline_seconds:g} s"
                )
                return

    # --- what can start -----------------------------------------------------------------------

    def _start_what_can(self) -> None:
        self._start_woken(partial=False)
        if self.calls or not self.steps:
            return
        for step in self.steps:
            for node in self._preference:
                self._wake(step, node)
        self._start_woken(partial=True)
        if not self.calls and not self.failed:
            self._fail("nothing runs and nothing can start")

    def _start_woken(self, *, partial: bool) -> None:
        """Start barriers and woken stages until nothing changes, or with `partial` one runs."""
        while True:
            while barrier := self._board.due():
                self._start_barrier(barrier)
            if not self._woken or (partial and self.calls):
                return
            woken = sorted(self._woken, key=lambda key: (key[0], self._preference[key[1]]))
            self._woken.clear()
            for step, index in woken:
                state = self.steps.get(step)
                if state and not (partial and self.calls):
                    self._start_stage(state, self.graph.nodes[index], partial)

    def _start_stage(self, state: StepState, node: StageNode, partial: bool) -> None:
        """Start calls of a stage on idle replicas while there is work that may start."""
        ledger = state.ledgers[node.index]
        if not ledger.leased and not ledger.ready() and not node.sticky:
            return
        unused = []
        while (replica := self._board.next_replica(node.worker)) is not None:
            fresh = self._fresh(state, node, replica)
            units = self._lease(state, node, replica, partial) if fresh else []
            if units:
                self._run(state, node, replica, units)
                partial = False
                continue
            unused.append(replica)
            if fresh and not node.sticky:  # what holds one replica back holds back all
                break
        for replica in unused:
            self._board.put_back(node.worker, replica)
        if node.streaming:
            self._feed(state, node)
        self._want_gangs(state, node)

    def _fresh(self, state: StepState, node: StageNode, replica: int) -> bool:
        lanes = self._replicas[node.worker][replica]
        return self._admission.weights_fresh_enough(node.worker, lanes, state.step)

    def _lease(
        self, state: StepState, node: StageNode, replica: int, partial: bool = False
    ) -> list[int]:
        """Lease what a call on this replica should take; nothing if it should not start yet."""
        ledger = state.ledgers[node.index]
        lane = self._replicas[node.worker][replica][0]
        ready = ledger.ready(lane)
        stage = self._stage_plans[node.index]
        chunk = stage.chunk or ledger.num_units
        if not ready or (ready < chunk and not ledger.nothing_more_comes and not partial):
            return []
        wanted = min(ready, chunk)
        if node.streaming and stage.max_running:
            wanted = min(wanted, stage.max_running)
        units = ledger.lease(lane, wanted, self._admission.end(self.steps, state, node))
        if len(units) < wanted and not partial and not node.streaming:
            for unit in units:  # wait until the edges have room for the whole chunk
                ledger.give_back(unit)
            return []
        return units

    def _run(self, state: StepState, node: StageNode, replica: int, units: list[int]) -> None:
        ledger = state.ledgers[node.index]
        gang = self._replicas[node.worker][replica]
        inputs = tuple(state.inputs(node, ledger, share) for share in _shares(units, len(gang)))
        command = RunCall(self._new_call(), node.index, state.step, gang, inputs)
        call = self._start(command, state)
        call.units = units
        if node.streaming:
            call.unfinished = dict.fromkeys(units, node.expands)
            self._streaming.setdefault((state.step, node.index), []).append(command.call)
        self._count_staleness(state, node, gang, len(units) * ledger.unit_items)

    def _feed(self, state: StepState, node: StageNode) -> None:
        """Give ready items to streaming calls that have room, the least busy one first."""
        limit = self._stage_plans[node.index].max_running
        running = self._streaming.get((state.step, node.index))
        ledger = state.ledgers[node.index]
        while limit and running and ledger.ready():
            number = min(running, key=lambda n: (len(self.calls[n].unfinished), n))
            call = self.calls[number]
            assert isinstance(call.command, RunCall)
            lane = call.command.lanes[0]
            room = min(limit - len(call.unfinished), ledger.ready())
            if room <= 0 or self._board.held(lane):
                return
            if not self._admission.weights_fresh_enough(node.worker, (lane,), state.step):
                return
            end = self._admission.end(self.steps, state, node)
            units = ledger.lease(lane, room, end)
            if not units:
                return
            call.unfinished.update(dict.fromkeys(units, node.expands))
            inputs = state.inputs(node, ledger, units)
            self._out.append(FeedCall(number, node.index, state.step, lane, inputs))
            self._count_staleness(state, node, (lane,), len(units))

    def _want_gangs(self, state: StepState, node: StageNode) -> None:
        """Where a gang has work but not all of its lanes, hold the lanes until it has."""
        for replica, gang in enumerate(self._replicas[node.worker]):
            if len(gang) == 1:
                return
            key = (state.step, node.index, replica)
            if key in self._wanted_gangs or self._board.usable(gang):
                continue
            if not self._fresh(state, node, replica):
                continue
            units = self._lease(state, node, replica)
            for unit in units:
                state.ledgers[node.index].give_back(unit)
            if units:
                self._wanted_gangs.add(key)
                self._board.ask(Barrier(gang, state.step, node.index, replica))

    def _start_barrier(self, barrier: Barrier) -> None:
        state = self.steps[barrier.step]
        if barrier.command is not None:
            self._start(replace(barrier.command, call=self._new_call()), state)
            return
        self._wanted_gangs.discard((barrier.step, barrier.node, barrier.replica))
        node = self.graph.nodes[barrier.node]
        fresh = self._fresh(state, node, barrier.replica)
        units = self._lease(state, node, barrier.replica) if fresh else []
        if units:
            self._run(state, node, barrier.replica, units)
        else:
            for lane in barrier.lanes:
                self._free(lane)

    def _start(self, command: CallCommand, state: StepState) -> Call:
        lanes = command.lanes
        self._board.occupy(lanes)
        for lane in lanes:
            self._out += self._residency.bring(self._workers_of(command), lane)
        deadline = self.now + self.plan.deadline_seconds
        call = Call(command, set(lanes), deadline, state.step)
        self.calls[command.call] = call
        state.active_calls += 1
        heappush(self._deadlines, (deadline, command.call))
        self._out.append(command)
        return call

    def _workers_of(self, command: CallCommand) -> list[str]:
        """Workers whose state the command needs on its lanes."""
        match command:
            case RunCall(node=index) | RunFinish(node=index):
                return [self.graph.nodes[index].worker]
            case ExportWeights(source=source):
                return [source]
            case InstallWeights(source=source, target=target, local=local):
                return [source, target] if local else [target]

    def _count_staleness(
        self, state: StepState, node: StageNode, lanes: tuple[int, ...], items: int
    ) -> None:
        lag = self._admission.lag(node.worker, lanes, state.step)
        if lag is not None:
            state.staleness[lag] = state.staleness.get(lag, 0) + items

    def _free(self, lane: int) -> None:
        """A lane has nothing to do: whatever stands on it may have something."""
        self._board.free(lane)
        for index in self._nodes_on_lane[lane]:
            self._wake_in_all_steps(index)

    def _wake(self, step: int, node: int) -> None:
        self._woken[step, node] = None

    def _wake_in_all_steps(self, node: int) -> None:
        for step in self.steps:
            self._woken[step, node] = None

    def _new_call(self) -> int:
        self._next_call += 1
        return self._next_call

    def _fail(self, message: str, cause: BaseException | None = None) -> None:
        self.failed = True
        account = who_waits(self.graph, self.calls.values(), self.steps.values())
        self._out.append(FailRun("\n".join([message, *account]), cause))


def _shares(units: list[int], parts: int) -> list[list[int]]:
    """Contiguous shares, as even as possible, one for each lane of a gang."""
    base, extra = divmod(len(units), parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [units[start:end] for start, end in pairwise(bounds)]
