"""`Scheduler`: which calls can start now, and the starting of them.

A call starts when all of this holds:

  1. *order*: its lanes are idle and no barrier holds them (`LaneBoard`);
  2. *admission*: the weights are fresh enough, and each edge that leads out has room (`Admission`);
  3. *chunking*: `chunk` units are ready, or all that are still to come are (`StageLedger`);
  4. *turns*: a stage whose worker learns waits for those that come before it (`Turns`);
  5. *preference*: older steps first, then the plan's order of stages.

A fused loop is one such call, of its first member, for which 2 and 4 hold of all members. A
streaming call is fed up to the plan's `max_running` while it runs.

When nothing runs, a part of a chunk is started rather than wait: a run that can make progress does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from m2flow.engine.calls import Call
from m2flow.engine.lanes import Barrier
from m2flow.engine.ledger import StageLedger
from m2flow.engine.messages import (
    CallCommand,
    ExportWeights,
    FeedCall,
    InstallWeights,
    MoveState,
    RunCall,
    RunFinish,
)
from m2flow.engine.state import EngineState
from m2flow.engine.steps import StepState
from m2flow.flow.graph import StageNode


class Scheduler:
    """Starts calls.

    Args:
        engine: the state that is read, and in which calls, leases and lanes are entered.
    """

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self._gangs = {
            worker: [number for number, gang in enumerate(gangs) if len(gang) > 1]
            for worker, gangs in engine.replicas.items()
        }

    def start_what_can(self) -> bool:
        """Start every call that can start; False if steps are in flight and nothing runs."""
        engine = self._engine
        self._start_woken(partial=False)
        if engine.calls or not engine.steps:
            return True
        engine.wake_all()
        self._start_woken(partial=True)
        return bool(engine.calls)

    def _start_woken(self, *, partial: bool) -> None:
        """Start barriers and woken stages until nothing changes, or with `partial` one runs."""
        engine = self._engine
        while True:
            while barrier := engine.board.due():
                self._start_barrier(barrier)
            if not engine.any_woken or (partial and engine.calls):
                return
            for step, node in engine.take_woken():
                state = engine.steps.get(step)
                if state and not (partial and engine.calls):
                    self._start_stage(state, node, partial)

    def _start_stage(self, state: StepState, node: StageNode, partial: bool) -> None:
        """Start calls of a stage on idle replicas while there is work that may start."""
        engine, ledger = self._engine, state.ledgers[node.index]
        enough = ledger.sticky or self._enough(ledger, node, ledger.ready(), partial)
        # A generator is sent one Batch at a time.
        feeds = node.streaming and len(node.inputs) == 1 and engine.hungry
        if not (enough or feeds):
            return
        members = engine.members[node.index]
        if not members or not all(
            engine.turns.may_take_items(engine.steps, state, member) for member in members
        ):
            return
        if enough:
            self._start_on_idle(state, node, partial)
        if feeds:
            self._feed_calls(state, node)
        if enough and self._gangs[node.worker]:
            self._want_gangs(state, node)

    # --- leases -------------------------------------------------------------------------------

    def _enough(
        self, ledger: StageLedger, node: StageNode, ready: int, partial: bool = False
    ) -> bool:
        """Whether so many ready units make a call."""
        if not ready:
            return False
        chunk = self._engine.stage_plans[node.index].chunk or ledger.num_units
        return ready >= chunk or partial or ledger.nothing_more_comes

    def _fresh(self, state: StepState, node: StageNode, lanes: tuple[int, ...]) -> bool:
        """Whether the weights on these lanes are fresh enough for a call of the stage."""
        admission = self._engine.admission
        for member in self._engine.members[node.index]:
            if not admission.weights_fresh_enough(member.worker, lanes, state.step):
                return False
        return True

    def _lease(
        self, state: StepState, node: StageNode, gang: tuple[int, ...], partial: bool = False
    ) -> list[int]:
        """Lease what a call on this gang should take; nothing if it should not start yet."""
        ledger = state.ledgers[node.index]
        ready = ledger.ready(gang[0])
        stage = self._engine.stage_plans[node.index]
        if not self._enough(ledger, node, ready, partial):
            return []
        end = self._engine.admission.end(self._engine.steps, state, node)
        wanted = min(ready, stage.chunk or ledger.num_units)
        if node.streaming and stage.max_running:
            wanted = min(wanted, stage.max_running)
        units = ledger.lease(gang[0], wanted, end)
        if len(units) < wanted and not partial and not node.streaming:
            for unit in units:  # wait until the edges have room for the whole chunk
                ledger.give_back(unit)
            return []
        return units

    # --- calls of stages ----------------------------------------------------------------------

    def _start_on_idle(self, state: StepState, node: StageNode, partial: bool) -> None:
        board, sticky = self._engine.board, state.ledgers[node.index].sticky
        unused = []
        while (replica := board.next_replica(node.worker)) is not None:
            gang = board.replicas[node.worker][replica]
            fresh = self._fresh(state, node, gang)
            units = self._lease(state, node, gang, partial) if fresh else []
            if units:
                self._run(state, node, replica, units)
                partial = False
                continue
            unused.append(replica)
            if fresh and not sticky:  # what holds one replica back holds back all
                break
        for replica in unused:
            board.put_back(node.worker, replica)

    def _run(self, state: StepState, node: StageNode, replica: int, units: list[int]) -> None:
        engine, ledger = self._engine, state.ledgers[node.index]
        gang = engine.replicas[node.worker][replica]
        shares = [units] * len(gang) if node.streaming else shares_of(units, len(gang))
        inputs = tuple(
            state.inputs(node, ledger, share, lane)
            for lane, share in zip(gang, shares, strict=True)
        )
        fused, group = node.loop in engine.fused, engine.groups.get(node.index)
        without = state.recalled.get(node.index, ()) if node.streaming else ()
        call = self._start(
            RunCall(engine.new_call(), node.index, state.step, gang, inputs, fused, group, without),
            state,
        )
        call.units = units
        if node.streaming or node.loop is not None:
            call.take(units, node.expands, without)
        if node.streaming:
            engine.may_have_room(call, node)
        if node.accumulates:
            ledger.note_doers(units, replica)
        for member in engine.members[node.index]:
            self._count_staleness(state, member, gang, len(units) * ledger.unit_items)

    def _feed_calls(self, state: StepState, node: StageNode) -> None:
        """Give ready units to streaming calls that have room, the least busy one first."""
        engine, ledger = self._engine, state.ledgers[node.index]
        calls = engine.hungry.get((state.step, node.index))
        limit = engine.stage_plans[node.index].max_running
        if not calls or not limit or not (ledger.ready() or ledger.sticky):
            return
        for call in sorted(calls.values(), key=_least_busy):
            lanes = call.command.lanes
            room = min(limit - len(call.left), ledger.ready(lanes[0]))
            if limit == len(call.left):
                del calls[call.command.call]
            if room <= 0 or engine.board.held(lanes):
                continue
            if not self._fresh(state, node, lanes):
                continue
            units = ledger.lease(lanes[0], room, engine.admission.end(engine.steps, state, node))
            if not units and not ledger.sticky:  # what holds one call back holds back all
                return
            if units:
                self._feed(call, state, node, units)

    def _feed(self, call: Call, state: StepState, node: StageNode, units: list[int]) -> None:
        """Give a streaming call more items."""
        engine, ledger, lanes = self._engine, state.ledgers[node.index], call.command.lanes
        call.take(units, node.expands, state.recalled.get(node.index, ()))
        engine.heard_of(call)
        inputs = tuple(state.inputs(node, ledger, units, lane) for lane in lanes)
        command = FeedCall(call.command.call, node.index, state.step, lanes, inputs)
        engine.out.append(command)
        self._note_lanes(call, command)
        self._count_staleness(state, node, lanes, len(units))

    def _count_staleness(
        self, state: StepState, node: StageNode, lanes: tuple[int, ...], items: int
    ) -> None:
        lag = self._engine.admission.lag(node.worker, lanes, state.step)
        if lag is not None:
            state.staleness[lag] = state.staleness.get(lag, 0) + items

    # --- barriers -----------------------------------------------------------------------------

    def _want_gangs(self, state: StepState, node: StageNode) -> None:
        """Where a gang has work but not all of its lanes, hold the lanes until it has."""
        engine = self._engine
        fed = engine.stage_plans[node.index].max_running is not None
        for replica in self._gangs[node.worker]:
            gang = engine.replicas[node.worker][replica]
            key = (state.step, node.index, replica)
            if key in engine.wanted_gangs or engine.board.usable(gang):
                continue
            if fed and self._runs(state, node, gang):
                continue  # it takes more as it is; to hold its lanes would let it run dry
            if not self._fresh(state, node, gang):
                continue
            units = self._lease(state, node, gang)
            for unit in units:
                state.ledgers[node.index].give_back(unit)
            if units and not self._others_first(state, node, gang):
                engine.wanted_gangs.add(key)
                engine.board.ask(Barrier(gang, state.step, node.index, replica))

    def _others_first(self, state: StepState, node: StageNode, gang: tuple[int, ...]) -> bool:
        """Whether a lane of the gang has something to start that is preferred to this stage.

        A held lane starts nothing else, so a gang that held its lanes before its turn would have
        every other call on them be one of its own: where memory is short, each with a switch.
        """
        engine = self._engine
        for number, other in engine.steps.items():
            for lane in gang if number <= state.step else ():
                for index in engine.nodes_on_lane[lane]:
                    if (number, index) == (state.step, node.index):
                        break
                    if self._could_start(other, engine.graph.nodes[index], lane):
                        return True
        return False

    def _could_start(self, state: StepState, node: StageNode, lane: int) -> bool:
        """Whether a call of a stage could start on a lane if the lane was idle."""
        engine, ledger = self._engine, state.ledgers[node.index]
        members = engine.members[node.index]
        if not members or not self._enough(ledger, node, ledger.ready(lane)):
            return False
        if not all(engine.turns.may_take_items(engine.steps, state, one) for one in members):
            return False
        gang = next(lanes for lanes in engine.replicas[node.worker] if lane in lanes)
        units = self._lease(state, node, gang) if self._fresh(state, node, gang) else []
        for unit in units:
            ledger.give_back(unit)
        return bool(units)

    def _runs(self, state: StepState, node: StageNode, gang: tuple[int, ...]) -> bool:
        """Whether a gang works on a call of this stage and step."""
        calls = self._engine.calls.values()
        commands = (call.command for call in calls if call.step == state.step)
        return any(
            isinstance(command, RunCall) and (command.node, command.lanes) == (node.index, gang)
            for command in commands
        )

    def _start_barrier(self, barrier: Barrier) -> None:
        engine = self._engine
        state, command = engine.steps.get(barrier.step), barrier.command
        if command is not None:
            assert state is not None, "a step is not complete before its barriers"
            if self._is_void(command, state):
                self._let_go(barrier)
                return
            self._start(replace(command, call=engine.new_call()), state)
            return
        engine.wanted_gangs.discard((barrier.step, barrier.node, barrier.replica))
        node = engine.graph.nodes[barrier.node]
        units: list[int] = []
        if state is not None and self._fresh(state, node, barrier.lanes):
            units = self._lease(state, node, barrier.lanes)
            if units:
                self._run(state, node, barrier.replica, units)
        if not units:  # others have taken the work meanwhile
            self._let_go(barrier)

    def _is_void(self, command: CallCommand, state: StepState) -> bool:
        """Whether a `finish` is not due any more, because a lane was lost meanwhile."""
        if not isinstance(command, RunFinish) or state.ledgers[command.node].window_complete:
            return False
        state.finishing.discard(command.node)
        return True

    def _let_go(self, barrier: Barrier) -> None:
        for lane in barrier.lanes:
            self._engine.free(lane)

    def _start(self, command: CallCommand, state: StepState) -> Call:
        """Have a command carried out on its lanes, and its workers brought in before."""
        engine, lanes = self._engine, command.lanes
        engine.board.occupy(lanes)
        for lane in lanes:
            if engine.residency.limited(lane):
                engine.out += self._moves_before(command, lane)
        call = Call(command, set(lanes), engine.now, state.step)
        engine.calls[command.call] = call
        engine.last_call_on.update(dict.fromkeys(lanes, call))
        state.active_calls += 1
        engine.out.append(command)
        self._note_lanes(call, command)
        return call

    def _moves_before(self, command: CallCommand, lane: int) -> list[MoveState]:
        """Moves after which those are resident on a lane whom a command needs there."""
        bring = self._engine.residency.bring
        match command:
            case RunCall(node=index) | RunFinish(node=index):
                return bring(self._engine.workers[index], lane, working=True)
            case ExportWeights(source=source):
                return bring((source,), lane)
            case InstallWeights(source=source, target=target, local=local):
                return bring((source, target) if local else (target,), lane)

    def _note_lanes(self, call: Call, command: CallCommand | FeedCall) -> None:
        """Remember on which lanes a call depends, lest they be lost before it has ended."""
        if not self._engine.heals:
            return
        lanes = set(command.lanes)
        if isinstance(command, RunCall | FeedCall):
            lanes.update(p.lane for inputs in command.inputs for parts in inputs for p in parts)
        call.epochs.update((lane, self._engine.epochs.get(lane, 0)) for lane in lanes)


def _least_busy(call: Call) -> tuple[int, int]:
    return len(call.left), call.command.call


def shares_of(units: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Contiguous shares, as even as possible, one for each lane of a gang."""
    if parts == 1:
        return [units]
    base, extra = divmod(len(units), parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [units[start:end] for start, end in pairwise(bounds)]
