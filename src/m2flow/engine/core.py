"""`Engine`: the pure state machine that carries a Plan out.

`handle(*events)` returns commands. There are no threads, clocks, sockets or tensors here, and no
randomness: the same events, heard together alike, give the same commands. All state is in one
`EngineState`. This file says what events change: items arrive, calls end, steps are complete. What
follows from the end of a mini-batch is said by `Boundaries`, what can start then by the
`Scheduler`, and what is to be done again when a lane is lost by the `Healer`.

An event may be told twice, and the events of different lanes in any order: what is known already,
or comes from an earlier process of a lane or from a call that has ended, changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from m2flow.engine.boundaries import Boundaries
from m2flow.engine.calls import Call, call_name, who_waits
from m2flow.engine.healing import Healer
from m2flow.engine.loops import unjudged
from m2flow.engine.messages import (
    CallAborted,
    CallFailed,
    CallFinished,
    Command,
    CompleteStep,
    Event,
    ExportWeights,
    FailRun,
    InstallWeights,
    ItemsProduced,
    LaneLost,
    LaneReport,
    LaneRestarted,
    MoveFailed,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.engine.plan import Plan
from m2flow.engine.recalled import recall, skip_unneeded
from m2flow.engine.residency import Residency
from m2flow.engine.scheduler import Scheduler, shares_of
from m2flow.engine.state import EngineState
from m2flow.engine.steps import StepState
from m2flow.errors import CannotHeal, Stalled
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode


class Engine:
    """Carries out one plan for one graph, step after step.

    Args:
        graph: what is to be done.
        plan: how; it must fit the graph (`m2flow.plan.validate`).
        first_step: number of the first step that will be submitted; the weights that the workers
            were loaded with have this version.
        residency: who is resident on which lane, shared by the engines of one run, whose steps
            alternate; a new one by default.
        heal: go on when a lane is lost that comes back, and wait for it to be restarted; without
            this the run is stopped.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        first_step: int = 0,
        residency: Residency | None = None,
        *,
        heal: bool = False,
    ) -> None:
        self.graph, self.plan = graph, plan
        self._state = EngineState(graph, plan, first_step, residency, heal)
        self._scheduler = Scheduler(self._state)
        self._healer = Healer(self._state)
        self._boundaries = Boundaries(self._state)

    @property
    def steps(self) -> dict[int, StepState]:
        """The steps in flight."""
        return self._state.steps

    @property
    def calls(self) -> dict[int, Call]:
        """The calls in progress by number, those that have been silent longest first."""
        return self._state.calls

    @property
    def fused(self) -> frozenset[int]:
        """Numbers of the loops that run fused."""
        return self._state.fused

    @property
    def failed(self) -> bool:
        """Whether the run was stopped; every later event is ignored then."""
        return self._state.failed

    @property
    def has_lost(self) -> bool:
        """Whether a lane is lost, or was and is back."""
        return bool(self._state.lost or self._state.epochs)

    def weights_on(self, lane: int) -> dict[tuple[str, str], int | None]:
        """By source and target the versions that are installed on a lane; None where an install of
        a newer one is asked for already."""
        asked = {
            (command.source, command.target)
            for command in self._state.board.asked(lane)
            if isinstance(command, InstallWeights)
        }
        versions = self._state.admission.versions_on(lane).items()
        return {edge: None if edge in asked else version for edge, version in versions}

    def handle(self, *events: Event) -> list[Command]:
        """Take events in; the commands they lead to, in the order they are to be carried out.

        What is heard together is taken in together, and only then is anything started: the last
        items of a call do not make others busy on lanes that its end would have asked for.
        """
        engine = self._state
        engine.out = []
        any_news = False  # or whatever could start has started
        for event in events:
            if engine.failed:
                break
            if isinstance(event, Tick):
                self._tick(event)
                continue
            any_news = True
            try:
                self._take_in(event)
            except CannotHeal as error:
                self._fail(str(error), error)
        may_start = any_news and not engine.failed
        if may_start and not self._scheduler.start_what_can() and not engine.lost:
            self._fail("nothing runs and nothing can start")
        return engine.out

    def _is_late(self, event: LaneReport) -> bool:
        """Whether a report does not come from the process that the lane has now."""
        engine = self._state
        return event.epoch != engine.epochs.get(event.lane, 0) or event.lane in engine.lost

    def _call(self, number: int) -> Call | None:
        """A call that has not ended."""
        assert 0 < number <= self._state.last_call, f"there has been no call {number}"
        return self._state.calls.get(number)

    # --- what events change -------------------------------------------------------------------

    def _take_in(self, event: LaneReport | StepSubmitted | LaneRestarted) -> None:
        if isinstance(event, ItemsProduced):  # nearly always
            if not self._is_late(event):
                self._items_produced(event)
            return
        match event:
            case StepSubmitted():
                self._step_submitted(event)
            case LaneRestarted(lane=lane, epoch=epoch):
                self._healer.restarted(lane, epoch)
            case _ if self._is_late(event):
                pass
            case CallFinished() | CallAborted():
                self._part_ended(event)
            case CallFailed():
                self._call_failed(event)
            case MoveFailed(what=what, worker=worker, lane=lane):
                self._fail(f"{what} of {worker} failed on lane {lane}", event.error)
            case LaneLost():
                self._lane_lost(event)

    def _step_submitted(self, event: StepSubmitted) -> None:
        engine = self._state
        assert event.step not in self.steps, f"step {event.step} was submitted twice"
        state = StepState(self.graph, event.step, event.num_items, engine.fused)
        self.steps[event.step] = state
        there = [recall(state, some) for some in event.recalled]
        if there:
            skip_unneeded(state)
        items, readers = range(event.num_items), engine.readers[SOURCE]
        self._arrive(state, SOURCE, items, readers, event.lengths)
        for stream, outside, some in there:
            self._arrive(state, stream, some.items, outside, some.lengths)
        for node in self.graph.nodes:
            if node.has_finish or there:
                self._boundaries.close_window(state, node)

    def _arrive(
        self,
        state: StepState,
        producer: int,
        items: Sequence[int],
        at: Sequence[int],
        lengths: Sequence[float] = (),
        *,
        stream: int | None = None,
    ) -> None:
        column = self._state.length_columns[producer]
        for consumer in at:
            heard = lengths if self.graph.nodes[consumer].length == column else ()
            ledger = state.ledgers[consumer]
            if ledger.arrive(producer if stream is None else stream, items, heard):
                self._state.wake(state.step, consumer)

    # --- items --------------------------------------------------------------------------------

    def _items_produced(self, event: ItemsProduced) -> None:
        call, engine = self._call(event.call), self._state
        if call is None:
            return
        if not event.items:  # a sign of life
            if not call.withdrawn:
                engine.heard_of(call)
            return
        command = call.command
        assert isinstance(command, RunCall)
        state, node = self.steps[call.step], self.graph.nodes[command.node]
        if call.withdrawn:  # another call makes them again
            self._state.discard(state, node.index, event.items, event.lane)
            return
        engine.admission.observe_bytes(node.index, len(event.items), event.num_bytes)
        if node.streaming:
            engine.heard_of(call)
            new, done = call.hand_on(event.items, node.expands)
            self._put(state, node, event, _without(new, call.void))
            if done:
                engine.may_have_room(call, node)
                self._units_done(state, node, done, command.lanes)
                self._boundaries.close_window(state, node)
                engine.wake(call.step, node.index)
        elif node.loop is None:
            self._put(state, node, event, _without(event.items, call.void))
        else:
            items, _ = call.hand_on(event.items, 1)
            if command.fused:
                engine.heard_of(call)
                if items:
                    self._come_out(state, node, event, items)
            elif items:
                self._go_around(state, node, event, items)

    def _put(
        self, state: StepState, node: StageNode, event: ItemsProduced, items: Sequence[int]
    ) -> None:
        """Items of a stage outside of loops are there: those that were not before arrive."""
        index = node.index
        new = state.directory.add(index, items, event.lane)
        if len(new) < len(event.items):  # made again beside others of their unit, or told twice
            self._state.discard(state, index, event.items, event.lane)
        lengths = _of_items(event, new) if event.lengths else ()
        self._arrive(state, index, new, self._state.readers[index], lengths)

    def _go_around(
        self, state: StepState, node: StageNode, event: ItemsProduced, items: Sequence[int]
    ) -> None:
        """Send items on to the next member of their loop, or out of it."""
        assert node.loop is not None
        spec, loop, lane = self.graph.loops[node.loop], state.loops[node.loop], event.lane
        place = spec.members.index(node.index)
        at_the_end = place == len(spec.members) - 1
        loop.judged |= event.judged
        for producer, some in state.moved_on(node, items, (lane,)):
            replaced = (lane,) if producer == node.index else ()
            self._state.release(state, producer, some, also=(lane,), but=replaced)
        if at_the_end and spec.max_turns is None and not loop.judged:
            error = unjudged(self.graph, node.loop)
            self._fail(str(error), error)
            return
        state.directory.put(node.index, items, lane)
        # Done already, and not when the call has ended: by then an item may be back here.
        self._finish_units(state, node, items)
        leaving, staying = [], []
        asked_to_leave = set(event.leaving)
        for item in items:
            loop.came_from[item] = node.index
            turn = loop.turns.get(item, 0) + at_the_end
            if item in asked_to_leave or (at_the_end and turn == spec.max_turns):
                loop.turns.pop(item, None)
                leaving.append(item)
            else:
                loop.turns[item] = turn
                staying.append(item)
        self._leave(state, node.loop, leaving, _of_items(event, leaving))
        following = spec.members[(place + 1) % len(spec.members)]
        self._arrive(state, node.index, staying, [following])

    def _come_out(
        self, state: StepState, first: StageNode, event: ItemsProduced, items: Sequence[int]
    ) -> None:
        """Items have been around a fused loop and have left it."""
        assert first.loop is not None
        for producer, some in state.consumed(first, items, (event.lane,)):
            self._state.release(state, producer, some, also=(event.lane,))
        state.directory.put(first.index, items, event.lane)
        self._finish_units(state, first, items)
        state.loops[first.loop].came_from.update(dict.fromkeys(items, first.index))
        self._leave(state, first.loop, items, _of_items(event, items))

    def _leave(
        self, state: StepState, loop: int, items: Sequence[int], lengths: Sequence[float]
    ) -> None:
        members = self.graph.loops[loop].members
        state.loops[loop].left += len(items)
        outside = [c for c in self._state.readers[members[-1]] if c not in members]
        self._arrive(state, members[-1], items, outside, lengths)

    # --- ends of calls ------------------------------------------------------------------------

    def _part_ended(self, event: CallFinished | CallAborted) -> None:
        """A lane has finished, or stopped, its part of a call."""
        call, engine = self._call(event.call), self._state
        if call is None or event.lane not in call.running:
            return
        if isinstance(event, CallAborted) and not call.withdrawn:
            self._fail(f"lane {event.lane} stopped a call unasked", None)
            return
        call.running.discard(event.lane)
        command = call.command
        if isinstance(command, RunCall) and self.graph.nodes[command.node].streaming:
            engine.takes_no_more(call)
        if not call.running:
            self._call_ended(call)

    def _call_failed(self, event: CallFailed) -> None:
        """A call has raised: the first cause of a run's end, unless a lost lane is the reason."""
        call = self._call(event.call)
        if call is None or event.lane not in call.running:
            return
        if call.withdrawn or self._healer.explains(call):
            self._healer.withdraw(call, without=(event.lane,), begun=event.begun)
            if not call.running:
                self._call_ended(call)
            return
        name = call_name(self.graph, call.command)
        self._fail(f"{name} failed on lane {event.lane}", event.error)

    def _call_ended(self, call: Call) -> None:
        """All lanes of a call have answered."""
        engine = self._state
        engine.forget_call(call)
        if not call.withdrawn:
            self._carried_out(call)
        self._complete_steps()

    def _carried_out(self, call: Call) -> None:
        state = self.steps[call.step]
        match call.command:
            case RunCall(node=index):
                self._stage_call_finished(call, self.graph.nodes[index])
            case RunFinish(node=index):
                state.finishing.discard(index)
                self._boundaries.next_window(state, self.graph.nodes[index])
            case ExportWeights(source=source):
                self._boundaries.ask_installs(state, source, local=False)
            case InstallWeights(source=source, target=target, version=version, lanes=lanes):
                self._state.admission.installed(source, target, lanes[0], version)
                state.installs -= 1
                self._boundaries.wake_worker(target)

    def _complete_steps(self) -> None:
        """Steps are complete in order: one that has overtaken an older one waits for it."""
        for state in list(self.steps.values()):
            if state.open_nodes or state.installs or state.active_calls:
                return
            del self.steps[state.step]
            self._state.out.append(
                CompleteStep(state.step, state.step + 1, dict(state.staleness), state.output())
            )

    def _stage_call_finished(self, call: Call, node: StageNode) -> None:
        state, command = self.steps[call.step], call.command
        if node.streaming:
            for unit in call.left:  # fed when the call had already run dry: never started
                self._healer.give_back(state, node, unit)
        elif node.loop is None:
            shares = shares_of(call.units, len(command.lanes))
            for lane, share in zip(command.lanes, shares, strict=True):
                self._units_done(state, node, share, (lane,))
        members = (node.index,) if node.loop is None else self.graph.loops[node.loop].members
        for member in members:
            self._boundaries.close_window(state, self.graph.nodes[member])
            self._state.wake(call.step, member)

    def _units_done(
        self, state: StepState, node: StageNode, units: Sequence[int], lanes: Sequence[int]
    ) -> None:
        """Lanes have made all outputs of units, so that the inputs may go."""
        if not units:
            return
        items = state.ledgers[node.index].items_of(units)
        self._finish_units(state, node, units)
        for producer, some in state.consumed(node, items, lanes):
            self._state.release(state, producer, some, also=lanes)
        if state.directory.makes_again:
            self._healer.check_outputs(state, node, units)

    def _finish_units(self, state: StepState, node: StageNode, units: Sequence[int]) -> None:
        """Units are done: their producers may have room again."""
        state.ledgers[node.index].finish(units)
        for producer in self._state.admission.bounded_producers(node.index):
            self._state.wake_in_all_steps(producer)

    # --- lanes, time and the end --------------------------------------------------------------

    def _lane_lost(self, event: LaneLost) -> None:
        if not (self._state.heals and event.comes_back):
            self._fail(f"lane {event.lane} was lost: {event.reason}")
            return
        for call in self._healer.lost(event.lane):
            self._call_ended(call)
        for state in list(self.steps.values()):
            for node in self.graph.nodes:
                self._boundaries.close_window(state, node)

    def _tick(self, event: Tick) -> None:
        self._state.now = event.now
        if not event.judge or not self._state.calls:
            return
        deadline = self.plan.deadline_seconds
        call = next(iter(self._state.calls.values()))  # silent longest; all have one deadline
        if call.heard + deadline <= event.now:
            name = call_name(self.graph, call.command)
            late = f"{name} has not finished within its deadline of {deadline:g} s"
            self._fail(late, Stalled(late))

    def _fail(self, message: str, cause: BaseException | None = None) -> None:
        self._state.failed = True
        account = who_waits(self.graph, self.calls.values(), self.steps.values())
        self._state.out.append(FailRun("\n".join([message, *account]), cause))


def _without(items: Sequence[int], others: Collection[int]) -> Sequence[int]:
    return [item for item in items if item not in others] if others else items


def _of_items(event: ItemsProduced, items: Sequence[int]) -> list[float]:
    """The lengths of some of the items of an event, where it says any."""
    if not event.lengths:
        return []
    if len(items) == len(event.items):
        return list(event.lengths)
    lengths = dict(zip(event.items, event.lengths, strict=True))
    return [lengths[item] for item in items]
