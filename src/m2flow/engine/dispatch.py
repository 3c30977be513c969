"""`Dispatcher`: which calls can start now, and the starting of them.

A call starts when all of this holds:

  1. *order*: its lanes are idle and no barrier holds them (`LaneBoard`);
  2. *admission*: the weights are fresh enough, and each edge that leads out has room (`Admission`);
  3. *chunking*: `chunk` units are ready, or all that are still to come are (`StageLedger`);
  4. *turns*: a stage whose worker learns waits for those that come before it (`Turns`);
  5. *preference*: older steps first, then the plan's order of stages.

A fused loop is one such call, of its first member, for which 2 and 4 hold of all members. With a
call on a lane under a memory limit, the worker that will be needed there next is brought as well
if there is room: `_next_on` says who that is.

When nothing runs, a part of a chunk is started rather than wait: a run that can make progress does.
What has not been woken is not looked at, so the work is linear in what happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from m2flow.engine.admission import Admission
from m2flow.engine.calls import Call, CallCommand
from m2flow.engine.feeding import Feeder
from m2flow.engine.lanes import Barrier, LaneBoard
from m2flow.engine.ledger import StageLedger
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


class Dispatcher:
    """Starts calls.

    Args:
        graph, plan: as for `Engine`.
        admission: what may be taken.
        turns: who waits for whom.
        steps: the steps in flight, oldest first; the engine's own table.
        residency: who is resident where.
        fused: loops that run fused.

    Attributes:
        calls: what is in progress, silent longest first.
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
        residency: Residency,
        fused: frozenset[int],
    ) -> None:
        self.graph, self.plan, self.steps = graph, plan, steps
        self.calls: dict[int, Call] = {}
        self.out: list[Command] = []
        self.now = 0.0
        self._admission, self._turns = admission, turns
        self._replicas = {worker: plan.placements[worker].replicas for worker in graph.workers}
        self._board = LaneBoard([lane.id for lane in plan.lanes], self._replicas)
        self._residency, self._fused = residency, fused
        self._members = [_members_of_call(graph, node, fused) for node in graph.nodes]
        self._workers = [_workers_of_call(plan, members) for members in self._members]
        self._gangs = {
            worker: [number for number, gang in enumerate(gangs) if len(gang) > 1]
            for worker, gangs in self._replicas.items()
        }
        self._stage_plans = [plan.stages.get(node.name, StagePlan()) for node in graph.nodes]
        self._next_call = 0
        self._feeder = Feeder(self._stage_plans, admission, self._board)
        self._wanted_gangs: set[tuple[int, int, int]] = set()
        self._woken: dict[tuple[int, int], None] = {}  # (step, place in order of preference)
        order = {name: place for place, name in enumerate(plan.order)}
        preferred = sorted(graph.nodes, key=lambda n: (order.get(n.name, len(order)), n.index))
        self._preferred = preferred
        self._preference = {node.index: place for place, node in enumerate(preferred)}
        self._nodes_on_lane: dict[int, list[int]] = {lane.id: [] for lane in plan.lanes}
        for node in preferred:
            for lane in plan.placements[node.worker].lanes:
                self._nodes_on_lane[lane].append(node.index)
        self._targets = tuple(dict.fromkeys(edge.target for edge in graph.weight_edges))

    def wake(self, step: int, node: int) -> None:
        """A stage may have something to start in this step."""
        self._woken[step, self._preference[node]] = None

    def wake_in_all_steps(self, node: int) -> None:
        """A stage may have something to start in any step."""
        place = self._preference[node]
        for step in self.steps:
            self._woken[step, place] = None

    def ask(self, barrier: Barrier) -> None:
        """Start a call once all of its lanes are idle."""
        self._board.ask(barrier)

    def finished(self, number: int, lane: int) -> Call | None:
        """A lane has finished its part of a call; the call, if that was the last part of it."""
        call = self.calls[number]
        call.running.discard(lane)
        command = call.command
        if isinstance(command, RunCall) and self.graph.nodes[command.node].streaming:
            self._feeder.ended(call)
        if call.running:
            return None
        del self.calls[number]
        for lane in command.lanes:
            self._free(lane)
        return call

    def alive(self, call: Call) -> None:
        """A call has handed items on, or was given some."""
        call.heard = self.now
        number = call.command.call
        self.calls[number] = self.calls.pop(number)

    def hungry(self, call: Call, node: StageNode) -> None:
        """A streaming call may have room for more items, unless a lane of it has ended already."""
        if len(call.running) == len(call.command.lanes):
            self._feeder.hungry(call, node)

    def overdue(self) -> Call | None:
        """A call that has given no sign of life for longer than the plan's deadline."""
        for call in self.calls.values():  # in order of silence, and all have the same deadline
            return call if call.heard + self.plan.deadline_seconds <= self.now else None
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
            woken = sorted(self._woken)
            self._woken.clear()
            for step, place in woken:
                state = self.steps.get(step)
                if state and not (partial and self.calls):
                    self._start_stage(state, self._preferred[place], partial)

    def _start_stage(self, state: StepState, node: StageNode, partial: bool) -> None:
        """Start calls of a stage on idle replicas while there is work that may start."""
        ledger = state.ledgers[node.index]
        members = self._members[node.index]
        if not members or not (ledger.leased or ledger.ready() or ledger.sticky):
            return
        for member in members:
            if not self._turns.may_take_items(self.steps, state, member):
                return
        if ledger.sticky or self._enough(ledger, node, ledger.ready(), partial):
            self._start_on_idle(state, node, partial)
        if node.streaming and len(node.inputs) == 1:  # a generator is sent one Batch at a time
            for call, units in self._feeder.lease(self.steps, state, node):
                self._feed(call, state, node, units)
        if self._gangs[node.worker]:
            self._want_gangs(state, node)

    def _enough(
        self, ledger: StageLedger, node: StageNode, ready: int, partial: bool = False
    ) -> bool:
        """Whether so many ready units make a call."""
        if not ready:
            return False
        chunk = self._stage_plans[node.index].chunk or ledger.num_units
        return ready >= chunk or partial or ledger.nothing_more_comes

    def _start_on_idle(self, state: StepState, node: StageNode, partial: bool) -> None:
        sticky = state.ledgers[node.index].sticky
        unused = []
        while (replica := self._board.next_replica(node.worker)) is not None:
            fresh = self._fresh(state, node, replica)
            units = self._lease(state, node, replica, partial) if fresh else []
            if units:
                self._run(state, node, replica, units)
                partial = False
                continue
            unused.append(replica)
            if fresh and not sticky:  # what holds one replica back holds back all
                break
        for replica in unused:
            self._board.put_back(node.worker, replica)

    def _fresh(self, state: StepState, node: StageNode, replica: int) -> bool:
        lanes = self._replicas[node.worker][replica]
        for member in self._members[node.index]:
            if not self._admission.weights_fresh_enough(member.worker, lanes, state.step):
                return False
        return True

    def _lease(
        self, state: StepState, node: StageNode, replica: int, partial: bool = False
    ) -> list[int]:
        """Lease what a call on this replica should take; nothing if it should not start yet."""
        ledger = state.ledgers[node.index]
        lane = self._replicas[node.worker][replica][0]
        ready = ledger.ready(lane)
        stage = self._stage_plans[node.index]
        if not self._enough(ledger, node, ready, partial):
            return []
        end = self._admission.end(self.steps, state, node)
        wanted = min(ready, stage.chunk or ledger.num_units)
        if node.streaming and stage.max_running:
            wanted = min(wanted, stage.max_running)
        units = ledger.lease(lane, wanted, end)
        if len(units) < wanted and not partial and not node.streaming:
            for unit in units:  # wait until the edges have room for the whole chunk
                ledger.give_back(unit)
            return []
        return units

    def _run(self, state: StepState, node: StageNode, replica: int, units: list[int]) -> None:
        ledger = state.ledgers[node.index]
        gang = self._replicas[node.worker][replica]
        shares = [units] * len(gang) if node.streaming else _shares(units, len(gang))
        inputs = tuple(state.inputs(node, ledger, share) for share in shares)
        fused = node.loop in self._fused
        command = RunCall(self._new_call(), node.index, state.step, gang, inputs, fused)
        call = self._start(command, state)
        call.units = units
        if node.streaming:
            call.unfinished = dict.fromkeys(units, node.expands)
            self.hungry(call, node)
        for member in self._members[node.index]:
            self._count_staleness(state, member, gang, len(units) * ledger.unit_items)

    def _feed(self, call: Call, state: StepState, node: StageNode, units: list[int]) -> None:
        """Give a streaming call more items."""
        ledger = state.ledgers[node.index]
        number, lanes = call.command.call, call.command.lanes
        call.unfinished.update(dict.fromkeys(units, node.expands))
        self.alive(call)
        inputs = state.inputs(node, ledger, units)
        self.out.append(FeedCall(number, node.index, state.step, lanes, inputs))
        self._count_staleness(state, node, lanes, len(units))

    def _want_gangs(self, state: StepState, node: StageNode) -> None:
        """Where a gang has work but not all of its lanes, hold the lanes until it has."""
        for replica in self._gangs[node.worker]:
            gang = self._replicas[node.worker][replica]
            key = (state.step, node.index, replica)
            if key in self._wanted_gangs or self._board.usable(gang):
                continue
            if self._feeder.may_be_fed(node) and self._runs(state, node, gang):
                continue  # it takes more as it is; to hold its lanes would let it run dry
            if not self._fresh(state, node, replica):
                continue
            units = self._lease(state, node, replica)
            for unit in units:
                state.ledgers[node.index].give_back(unit)
            if units:
                self._wanted_gangs.add(key)
                self._board.ask(Barrier(gang, state.step, node.index, replica))

    def _runs(self, state: StepState, node: StageNode, gang: tuple[int, ...]) -> bool:
        """Whether a gang works on a call of this stage and step."""
        commands = (call.command for call in self.calls.values() if call.step == state.step)
        return any(
            isinstance(command, RunCall) and (command.node, command.lanes) == (node.index, gang)
            for command in commands
        )

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
        early: list[Command] = []
        for lane in lanes:
            if self._residency.limited(lane):
                early += self._bring(command, lane)
        call = Call(command, set(lanes), self.now, state.step)
        self.calls[command.call] = call
        state.active_calls += 1
        self.out.append(command)
        self.out += early
        return call

    def _bring(self, command: CallCommand, lane: int) -> list[Command]:
        """Have those resident whom a command needs; the onload that may go on beside it."""
        match command:
            case RunCall(node=index) | RunFinish(node=index):
                needed = self._workers[index]
                self.out += self._residency.bring(needed, lane, working=True)
                coming = self._next_on(lane, index)
                if coming is None:
                    return []
                moves = self._residency.bring_early(coming, needed, lane)
                self.out += moves[:-1]
                return list(moves[-1:])
            case ExportWeights(source=source):
                self.out += self._residency.bring((source,), lane)
            case InstallWeights(source=source, target=target, local=local):
                workers = (source, target) if local else (target,)
                self.out += self._residency.bring(workers, lane)
        return []

    def _next_on(self, lane: int, index: int) -> str | None:
        """The worker that will be needed on a lane after those of a call that starts there now.

        The lane's stages are gone through in the order of the flow, from the call's own onwards
        and around: the first that belongs to another worker and has work left in a step in flight
        says who it is. If there is none, it is who takes published weights on the lane, because
        every step in flight ends with that.
        """
        running = self._workers[index]
        here = self._nodes_on_lane[lane]
        around = sorted(here, key=lambda other: (other <= index, other))
        for other in around:
            node = self.graph.nodes[other]
            if node.worker not in running and any(
                state.ledgers[other].work_left for state in self.steps.values()
            ):
                return node.worker
        for target in self._targets:
            if target not in running and lane in self.plan.placements[target].lanes:
                return target
        return None

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


def _members_of_call(
    graph: FlowGraph, node: StageNode, fused: frozenset[int]
) -> tuple[StageNode, ...]:
    """The stages that a call of this one runs: of a fused loop the first member runs all."""
    if node.loop is None or node.loop not in fused:
        return (node,)
    members = graph.loops[node.loop].members
    return tuple(graph.nodes[index] for index in members) if node.index == members[0] else ()


def _workers_of_call(plan: Plan, members: Sequence[StageNode]) -> tuple[str, ...]:
    """The workers that take memory in it: a pure function may have no share in that."""
    spots = [(node, plan.placements[node.worker]) for node in members]
    return tuple(
        dict.fromkeys(
            node.worker
            for node, spot in spots
            if not node.is_function or spot.state_bytes or spot.working_bytes
        )
    )


def _shares(units: list[int], parts: int) -> list[list[int]]:
    """Contiguous shares, as even as possible, one for each lane of a gang."""
    base, extra = divmod(len(units), parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [units[start:end] for start, end in pairwise(bounds)]
