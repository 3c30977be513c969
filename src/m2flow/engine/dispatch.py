"""`Dispatcher`: which calls can start now, and the starting of them.

A call starts when all of this holds:

  1. *order*: its lanes are idle and no barrier holds them (`LaneBoard`);
  2. *admission*: the weights are fresh enough, and each edge that leads out has room (`Admission`);
  3. *chunking*: `chunk` units are ready, or all that are still to come are (`StageLedger`);
  4. *turns*: a stage whose worker learns waits for those that come before it (`Turns`);
  5. *preference*: older steps first, then the plan's order of stages.

When nothing runs, a part of a chunk is started rather than wait: a run that can make progress does.
What has not been woken is not looked at, so the work is linear in what happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from m2flow.engine.admission import Admission
from m2flow.engine.lanes import Barrier, LaneBoard
from m2flow.engine.messages import (
    Command,
    ExportWeights,
    FeedCall,
    InstallWeights,
    RunCall,
    RunFinish,
)
from m2flow.engine.plan import Plan, StagePlan
from m2flow.engine.residency import Residency
from m2flow.engine.steps import StepState
from m2flow.engine.turns import Turns
from m2flow.flow.graph import FlowGraph, StageNode

CallCommand: TypeAlias = RunCall | RunFinish | ExportWeights | InstallWeights


@dataclass(slots=True)
class Call:
    """A call in progress.

    Attributes:
        running: lanes that have not finished their part.
        started: when it was started, in seconds of the engine's clock.
        units: units of a stage leased to it (what a streaming call was started with).
        unfinished: for a streaming call, unit to the number of output items still to come.
    """

    command: CallCommand
    running: set[int]
    started: float
    step: int
    units: list[int] = field(default_factory=list)
    unfinished: dict[int, int] = field(default_factory=dict)


class Dispatcher:
    """Starts calls.

    Args:
        graph, plan: as for `Engine`.
        admission: what may be taken.
        turns: who waits for whom.
        steps: the steps in flight, oldest first; the engine's own table.

    Attributes:
        calls: what is in progress, oldest first.
        out: the commands of the event at hand, in order.
        now: seconds of the engine's clock.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        admission: Admission,
        turns: Turns,
        steps: Mapping[int, StepState],
    ) -> None:
        self.graph, self.plan, self.steps = graph, plan, steps
        self.calls: dict[int, Call] = {}
        self.out: list[Command] = []
        self.now = 0.0
        self._admission, self._turns = admission, turns
        self._replicas = {worker: plan.placements[worker].replicas for worker in graph.workers}
        self._board = LaneBoard([lane.id for lane in plan.lanes], self._replicas)
        self._residency = Residency(plan)
        self._stage_plans = [plan.stages.get(node.name, StagePlan()) for node in graph.nodes]
        self._next_call = 0
        self._streaming: dict[tuple[int, int], list[int]] = {}
        self._wanted_gangs: set[tuple[int, int, int]] = set()
        self._woken: dict[tuple[int, int], None] = {}
        order = {name: place for place, name in enumerate(plan.order)}
        preferred = sorted(graph.nodes, key=lambda n: (order.get(n.name, len(order)), n.index))
        self._preference = {node.index: place for place, node in enumerate(preferred)}
        self._nodes_on_lane: dict[int, list[int]] = {lane.id: [] for lane in plan.lanes}
        for node in preferred:
            for lane in plan.placements[node.worker].lanes:
                self._nodes_on_lane[lane].append(node.index)

    def wake(self, step: int, node: int) -> None:
        """A stage may have something to start in this step."""
        self._woken[step, node] = None

    def wake_in_all_steps(self, node: int) -> None:
        """A stage may have something to start in any step."""
        for step in self.steps:
            self._woken[step, node] = None

    def ask(self, barrier: Barrier) -> None:
        """Start a call once all of its lanes are idle."""
        self._board.ask(barrier)

    def finished(self, number: int, lane: int) -> Call | None:
        """A lane has finished its part of a call; the call, if that was the last part of it."""
        call = self.calls[number]
        call.running.discard(lane)
        if call.running:
            return None
        del self.calls[number]
        command = call.command
        if isinstance(command, RunCall) and self.graph.nodes[command.node].streaming:
            running = self._streaming[call.step, command.node]
            running.remove(number)
            if not running:
                del self._streaming[call.step, command.node]
        for lane in command.lanes:
            self._free(lane)
        return call

    def overdue(self) -> Call | None:
        """A call that has run for longer than the plan's deadline."""
        for call in self.calls.values():  # in order of start, and all have the same deadline
            return call if call.started + self.plan.deadline_seconds <= self.now else None
        return None

    def start_what_can(self) -> bool:
        """Start every call that can start; False if steps are in flight and nothing runs."""
        self._start_woken(partial=False)
        if self.calls or not self.steps:
            return True
        for step in self.steps:
            for node in self._preference:
                self.wake(step, node)
        self._start_woken(partial=True)
        return bool(self.calls)

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
        if not self._turns.may_take_items(self.steps, state, node):
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
        if node.streaming and len(node.inputs) == 1:  # a generator is sent one Batch at a time
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
            self.out.append(FeedCall(number, node.index, state.step, lane, inputs))
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
        state = self.steps.get(barrier.step)
        if barrier.command is not None:
            assert state is not None, "a step is not complete before its barriers"
            self._start(replace(barrier.command, call=self._new_call()), state)
            return
        self._wanted_gangs.discard((barrier.step, barrier.node, barrier.replica))
        node = self.graph.nodes[barrier.node]
        units: list[int] = []
        if state is not None and self._fresh(state, node, barrier.replica):
            units = self._lease(state, node, barrier.replica)
            if units:
                self._run(state, node, barrier.replica, units)
        if not units:  # others have taken the work meanwhile
            for lane in barrier.lanes:
                self._free(lane)

    def _start(self, command: CallCommand, state: StepState) -> Call:
        lanes = command.lanes
        self._board.occupy(lanes)
        for lane in lanes:
            self.out += self._residency.bring(self._workers_of(command), lane)
        call = Call(command, set(lanes), self.now, state.step)
        self.calls[command.call] = call
        state.active_calls += 1
        self.out.append(command)
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
            self.wake_in_all_steps(index)

    def _new_call(self) -> int:
        self._next_call += 1
        return self._next_call


def _shares(units: list[int], parts: int) -> list[list[int]]:
    """Contiguous shares, as even as possible, one for each lane of a gang."""
    base, extra = divmod(len(units), parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [units[start:end] for start, end in pairwise(bounds)]
