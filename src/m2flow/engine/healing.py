"""`Healer`: what is to be done again when a lane is lost, and from what.

A lane takes with it the calls that it worked on, the payloads that no other lane holds, what its
workers had folded in since the last mini-batch, and the states of sticky items. So calls are
withdrawn (also from the lanes of a gang that are still there), their units are pending again, and
a stage that still waits for an item that no lane holds has it made again: the stage that made it
takes its inputs again, and if these are gone as well, those that made them do, back to inputs that
exist. Source items always do. What is made again besides, because it is of the same unit, is
dropped.

Not everything can be made again: a stage whose worker has changed in the step since (a mini-batch
is over, weights went out) would not make the same. Then the step cannot be saved (`CannotHeal`).

Everything here is linear in the step, and happens once for each lane that is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from m2flow.engine.calls import Call
from m2flow.engine.directory import NOT_MADE
from m2flow.engine.lanes import Barrier
from m2flow.engine.ledger import DONE, LEASED, READY, WAITING
from m2flow.engine.loops import LoopLedger
from m2flow.engine.messages import AbortCall, DropFolded, RunCall, RunFinish
from m2flow.engine.state import EngineState
from m2flow.engine.steps import StepState
from m2flow.errors import CannotHeal
from m2flow.flow.graph import SOURCE, StageNode


class Healer:
    """Undoes what went with a lane.

    Args:
        engine: the state that is changed.
    """

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine

    def lost(self, lane: int) -> list[Call]:
        """A lane is gone. The calls that have ended by this, because no other lane runs them.

        Raises:
            CannotHeal: something that is needed cannot be made again.
        """
        engine = self._engine
        if lane not in engine.nodes_on_lane:  # none of the plan's
            return []
        engine.lost.add(lane)
        engine.board.occupy((lane,))
        for state in engine.steps.values():  # before units are given back: they look for inputs
            state.directory.lose(lane)
        ended = []
        for call in list(engine.calls.values()):
            part_of = lane in call.running or (
                isinstance(call.command, RunCall) and lane in call.command.lanes
            )
            if part_of:
                self.withdraw(call, without=(lane,))
                if not call.running:
                    ended.append(call)
        for state in engine.steps.values():
            self._undo_folding(state, lane)
            self._unbind(state, lane)
            self._look_for_missing(state)
        engine.wake_all()
        return ended

    def restarted(self, lane: int, epoch: int) -> None:
        """A lane is up again, with nothing on it but its workers."""
        engine = self._engine
        if lane not in engine.lost or epoch <= engine.epochs.get(lane, 0):
            return  # told twice
        engine.lost.discard(lane)
        engine.epochs[lane] = epoch
        engine.residency.lost(lane)
        if not any(lane in call.command.lanes for call in engine.calls.values()):
            engine.free(lane)

    def explains(self, call: Call) -> bool:
        """Whether a call may have failed because of a lane that was lost."""
        engine = self._engine
        return call.disturbed or any(
            lane in engine.lost or engine.epochs.get(lane, 0) != epoch
            for lane, epoch in call.epochs.items()
        )

    # --- calls --------------------------------------------------------------------------------

    def withdraw(self, call: Call, without: Sequence[int], *, begun: bool = True) -> None:
        """Take a call's work back, once; lanes other than these are told to stop.

        A `finish` that one lane has brought to its end is done: the others take the state from it.

        Args:
            begun: whether a stage was called for it.
        """
        engine, command = self._engine, call.command
        others = tuple(sorted(call.running.difference(without, engine.lost)))
        finished = len(call.running) < len(command.lanes)
        call.running.difference_update(without)
        if call.withdrawn:
            return
        state = engine.steps[call.step]
        if isinstance(command, RunFinish) and finished:
            return
        call.withdrawn = True
        if others:
            engine.out.append(AbortCall(command.call, others))
        if isinstance(command, RunCall):
            node = engine.graph.nodes[command.node]
            if node.streaming:
                engine.takes_no_more(call)
            units = list(call.left) if node.streaming or node.loop is not None else call.units
            call.left.clear()
            for unit in units:
                self.give_back(state, node, unit)
            if node.accumulates and (begun or len(command.lanes) > 1):
                self._unfold(state, node, command.lanes)
        elif isinstance(command, RunFinish):
            state.finishing.discard(command.node)
        else:
            again = Barrier(command.lanes, call.step, SOURCE, command=command)
            engine.board.ask(again, first=True)

    def give_back(self, state: StepState, node: StageNode, unit: int) -> None:
        """A leased unit was not worked on after all; inputs that are gone are made again."""
        ledger = state.ledgers[node.index]
        ledger.give_back(unit)
        if self._engine.heals:
            self._wait_for_inputs(state, node, [unit])
        self._engine.wake(state.step, node.index)

    # --- what is to be done again -------------------------------------------------------------

    def check_outputs(self, state: StepState, node: StageNode, units: Iterable[int]) -> None:
        """Units are done: if an output of theirs was asked for again meanwhile, do them again."""
        size = state.ledgers[node.index].unit_items * node.expands
        for unit in units:
            outputs = range(unit * size, (unit + 1) * size)
            if any(state.directory.home(node.index, item) == NOT_MADE for item in outputs):
                self._do_again(state, node, [unit])

    def _look_for_missing(self, state: StepState) -> None:
        """Have items made again that are gone and that a stage, or the launcher, waits for."""
        graph = self._engine.graph
        for loop in range(len(graph.loops)):
            self._restart_stranded(state, loop)
        for node in reversed(graph.nodes):
            ledger = state.ledgers[node.index]
            waiting = [u for u in range(ledger.num_units) if ledger.status(u) in (WAITING, READY)]
            if node.loop is not None:  # those inside are seen to already
                inside = state.loops[node.loop].came_from
                waiting = [unit for unit in waiting if unit not in inside]
            self._wait_for_inputs(state, node, waiting)
        for producer in graph.output_nodes:
            for item in range(state.directory.size(producer)):
                if self._is_gone(state, producer, item):
                    self._make_again(state, graph.output, item)

    def _is_gone(self, state: StepState, producer: int, item: int) -> bool:
        """Whether an output item was made, and no lane holds it."""
        there = state.directory
        loop = self._engine.graph.nodes[producer].loop
        if loop is not None and state.loops[loop].came_from.get(item) != producer:
            return False
        return not there.holds(producer, item) and there.home(producer, item) != NOT_MADE

    def _wait_for_inputs(self, state: StepState, node: StageNode, units: Sequence[int]) -> None:
        """Have units wait for those of their inputs that no lane holds, and have these made."""
        ledger, directory = state.ledgers[node.index], state.directory
        items = ledger.items_of(units)
        if node.loop is not None:
            came_from = state.loops[node.loop].came_from
            for item in [item for item in items if item in came_from]:
                if not directory.holds(came_from[item], item):
                    self._restart(state, node.loop, item)
            items = [item for item in items if item not in came_from]
            if node.index != self._engine.graph.loops[node.loop].members[0]:
                return
        for stream in node.inputs:
            gone = [
                item for item in items if not directory.holds(state.maker(node, stream, item), item)
            ]
            if gone:
                ledger.depart(stream, gone)
            for item in gone:
                self._make_again(state, stream, item)

    def _make_again(self, state: StepState, stream: int, item: int) -> None:
        """A stage waits for an item that no lane holds: have its unit done again, if it was."""
        graph = self._engine.graph
        node = graph.nodes[stream]
        if node.loop is not None:
            if item in state.loops[node.loop].came_from:
                self._restart(state, node.loop, item)
            return
        if state.directory.home(stream, item) != NOT_MADE:
            state.directory.forget(stream, item)
        self._depart(state, stream, item)
        ledger = state.ledgers[node.index]
        unit = item // node.expands // ledger.unit_items
        if ledger.status(unit) == DONE:
            self._do_again(state, node, [unit])

    def _depart(self, state: StepState, stream: int, item: int) -> None:
        """Have all that are still to read an item, and have not begun to, wait for it."""
        for reader in state.readers(stream):
            waits = reader.status(item // reader.unit_items) in (WAITING, READY)
            if waits and not reader.has_read(item):
                reader.depart(stream, [item])

    def _do_again(
        self, state: StepState, node: StageNode, units: Sequence[int], *, unfolded: bool = False
    ) -> None:
        """Units that are done are pending again, and wait for inputs that no lane holds.

        Args:
            unfolded: what an accumulating stage has folded in of them is gone.
        """
        ledger = state.ledgers[node.index]
        self._check_state(state, node)
        if node.accumulates and not unfolded:
            raise self._unsavable(node, "they have been folded in")
        for unit in units:
            if ledger.reopen(unit):
                state.node_reopened(node)
        for call in self._engine.calls.values() if node.streaming else ():
            if isinstance(call.command, RunCall) and call.command.node == node.index:
                call.disturbed = True
                self._engine.takes_no_more(call)
        self._wait_for_inputs(state, node, units)
        self._engine.wake(state.step, node.index)

    def _check_state(self, state: StepState, node: StageNode) -> None:
        """Refuse to run a stage again whose worker has changed since it ran.

        Raises:
            CannotHeal: a mini-batch of the worker is over, or new weights went out to it.
        """
        for other in self._engine.nodes_of[node.worker]:
            ledger = state.ledgers[other.index]
            if other is node or not other.accumulates:
                continue
            changed = ledger.window > 0 or other.index in state.finishing
            if not other.has_finish:
                changed = ledger.has_folded
            if changed and other.index > node.index:
                raise self._unsavable(node, f"{other.name} has changed the worker since")
        sources = [e.source for e in self._engine.graph.weight_edges if e.target == node.worker]
        if any(source in state.settled for source in sources):
            raise self._unsavable(node, "new weights are on their way to it")

    def _unsavable(self, node: StageNode, why: str) -> CannotHeal:
        return CannotHeal(f"items of {node.name} are gone and cannot be made again: {why}")

    def _finishes(self, state: StepState, node: StageNode) -> bool:
        """Whether the `finish` of a mini-batch goes on, of which a lane may have done its part."""
        return any(
            isinstance(call.command, RunFinish)
            and (call.command.node, call.step) == (node.index, state.step)
            and not call.withdrawn
            for call in self._engine.calls.values()
        )

    def _undo_folding(self, state: StepState, lane: int) -> None:
        """What a replica has folded in since the last mini-batch is gone with one of its lanes."""
        for node in self._engine.graph.nodes:
            if self._finishes(state, node):
                continue
            for gang in self._engine.replicas[node.worker]:
                if lane in gang and node.accumulates:
                    self._unfold(state, node, gang)

    def _unfold(self, state: StepState, node: StageNode, gang: tuple[int, ...]) -> None:
        """A replica has lost a part of what it has folded in since the last mini-batch."""
        replica = self._engine.replicas[node.worker].index(gang)
        others = tuple(lane for lane in gang if lane not in self._engine.lost)
        if others:
            self._engine.out.append(DropFolded(node.index, state.step, others))
        units = state.ledgers[node.index].folded_by(replica)
        if units:
            self._do_again(state, node, units, unfolded=True)

    # --- sticky items -------------------------------------------------------------------------

    def _unbind(self, state: StepState, lane: int) -> None:
        """Items whose state was on the lane have none: their sticky stages begin anew."""
        graph = self._engine.graph
        for worker, homes in state.homes.items():
            bound = {key for key, home in homes.items() if home == lane}
            if not bound:
                continue
            sticky = [node for node in self._engine.nodes_of[worker] if node.sticky]
            for node in sticky:
                if node.loop is not None:
                    self._restart_bound(state, node, bound)
                    continue
                again = [
                    unit
                    for unit in range(state.ledgers[node.index].num_units)
                    if (node.fanout, unit) in bound and self._is_read_later(state, node, unit)
                ]
                done = [u for u in again if state.ledgers[node.index].status(u) == DONE]
                if done:
                    self._do_again(state, node, done)
            for key in bound:
                homes.pop(key, None)
            for node in graph.nodes:
                if state.ledgers[node.index].sticky:
                    state.ledgers[node.index].unbind(lane)

    def _is_read_later(self, state: StepState, node: StageNode, unit: int) -> bool:
        """Whether a sticky stage of the worker has still to work on an item, or its outputs."""
        for other in self._engine.nodes_of[node.worker]:
            if not other.sticky or other is node or other.fanout % node.fanout:
                continue
            ledger, made = state.ledgers[other.index], other.fanout // node.fanout
            items = range(unit * made, (unit + 1) * made)
            if other.loop is None and any(ledger.status(item) != DONE for item in items):
                return True
            if other.loop is not None:  # of a fused loop, its first member alone has read them
                book = state.loops[other.loop]
                if any(not ledger.has_read(item) and not book.has_left(item) for item in items):
                    return True
        return False

    def _restart_bound(
        self, state: StepState, node: StageNode, bound: Iterable[tuple[int, int]]
    ) -> None:
        """Items inside a loop whose state is gone begin anew at its entry."""
        assert node.loop is not None
        for fanout, item in bound:
            if fanout == node.fanout and item in state.loops[node.loop].turns:
                self._restart(state, node.loop, item)

    # --- loops --------------------------------------------------------------------------------

    def _restart_stranded(self, state: StepState, loop: int) -> None:
        """Items that wait inside a loop and whose payload is gone begin anew at its entry."""
        book, graph = state.loops[loop], self._engine.graph
        for item in list(book.turns):
            waits = any(
                state.ledgers[member].status(item) == READY for member in graph.loops[loop].members
            )
            if waits and not state.directory.holds(book.came_from[item], item):
                self._restart(state, loop, item)

    def _restart(self, state: StepState, loop: int, item: int) -> None:
        """Send an item through a loop anew, whether it is inside or has left."""
        engine, book = self._engine, state.loops[loop]
        members = [engine.graph.nodes[index] for index in engine.graph.loops[loop].members]
        for node in members:
            self._check_state(state, node)
        if book.has_left(item):
            book.left -= 1
            for node in members:
                ledger = state.ledgers[node.index]
                assert isinstance(ledger, LoopLedger)
                if ledger.reopen_loop():
                    state.node_reopened(node)
        made_by = book.came_from.pop(item, None)
        book.turns.pop(item, None)
        if made_by is not None and state.directory.holds(made_by, item):
            engine.release(state, made_by, [item])
        for node in members:
            ledger = state.ledgers[node.index]
            assert isinstance(ledger, LoopLedger)
            if ledger.status(item) == LEASED:
                self._drop(state, node, item)
            ledger.take_out(item)
            state.directory.forget(node.index, item)
            state.homes[node.worker].pop((node.fanout, item), None)
        first = state.ledgers[members[0].index]
        assert isinstance(first, LoopLedger)
        self._depart(state, members[-1].index, item)
        first.reenter(item)
        self._wait_for_inputs(state, members[0], [item])
        engine.wake(state.step, members[0].index)

    def _drop(self, state: StepState, node: StageNode, item: int) -> None:
        """A call that works on an item of a loop is to hand it on for nothing."""
        for call in self._engine.calls.values():
            command = call.command
            if (
                isinstance(command, RunCall)
                and (command.node, call.step) == (node.index, state.step)
                and item in call.left
            ):
                del call.left[item]
                call.disturbed = True
