"""`Engine`: the pure state machine that carries a Plan out.

`handle(*events)` returns commands. There are no threads, clocks, sockets or tensors here, and no
randomness: the same events, heard together alike, give the same commands. This file says what
events change: items arrive, calls and mini-batches end, weights go out, steps are complete. What
can start then is the `Dispatcher`'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.engine.account import call_name, unjudged, who_waits
from m2flow.engine.admission import Admission
from m2flow.engine.calls import Call
from m2flow.engine.dispatch import Dispatcher
from m2flow.engine.fusing import fused_loops
from m2flow.engine.homes import ANYWHERE
from m2flow.engine.lanes import Barrier
from m2flow.engine.messages import (
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
    MoveFailed,
    Part,
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.engine.plan import Plan
from m2flow.engine.residency import Residency
from m2flow.engine.steps import StepState
from m2flow.engine.turns import Turns
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

    Attributes:
        steps: the steps in flight.
        fused: numbers of the loops that run fused.
        failed: whether the run was stopped; every later event is ignored then.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        first_step: int = 0,
        residency: Residency | None = None,
    ) -> None:
        self.graph, self.plan = graph, plan
        self.fused = fused_loops(graph, plan)
        self.failed = False
        self.steps: dict[int, StepState] = {}
        self._admission = Admission(graph, plan, first_step)
        self._turns = Turns(graph)
        self._dispatcher = Dispatcher(
            graph,
            plan,
            self._admission,
            self._turns,
            self.steps,
            residency or Residency(plan),
            self.fused,
        )
        self._nodes_of = {w: [n for n in graph.nodes if n.worker == w] for w in graph.workers}
        streams = range(SOURCE, len(graph.nodes))
        self._readers = {
            stream: [node.index for node in graph.nodes if stream in node.inputs]
            for stream in streams
        }
        self._length_columns = {stream: graph.length_column(stream) for stream in streams}

    @property
    def calls(self) -> dict[int, Call]:
        """The calls in progress by number, those that have been silent longest first."""
        return self._dispatcher.calls

    def handle(self, *events: Event) -> list[Command]:
        """Take events in; the commands they lead to, in the order they are to be carried out.

        What is heard together is taken in together, and only then is anything started: the last
        items of a call do not make others busy on lanes that its end would have asked for.
        """
        self._dispatcher.out = []
        for event in events:
            if self.failed:
                break
            self._take_in(event)
        ticks = all(isinstance(event, Tick) for event in events)  # whatever could start has started
        if not ticks and not self.failed and not self._dispatcher.start_what_can():
            self._fail("nothing runs and nothing can start")
        return self._dispatcher.out

    # --- what events change -------------------------------------------------------------------

    def _take_in(self, event: Event) -> None:
        match event:
            case Tick():
                self._tick(event)
            case ItemsProduced():
                self._items_produced(event)
            case CallFinished():
                self._call_finished(event)
            case StepSubmitted():
                self._step_submitted(event)
            case CallFailed():
                name = call_name(self.graph, self.calls[event.call].command)
                self._fail(f"{name} failed on lane {event.lane}", event.error)
            case MoveFailed(what=what, worker=worker, lane=lane):
                self._fail(f"{what} of {worker} failed on lane {lane}", event.error)
            case LaneLost():
                self._fail(f"lane {event.lane} was lost: {event.reason}")

    def _step_submitted(self, event: StepSubmitted) -> None:
        assert event.step not in self.steps, f"step {event.step} was submitted twice"
        state = StepState(self.graph, event.step, event.num_items, self.fused)
        self.steps[event.step] = state
        items, readers = range(event.num_items), self._readers[SOURCE]
        self._arrive(state, SOURCE, items, readers, lengths=event.lengths)

    def _arrive(
        self,
        state: StepState,
        producer: int,
        items: Sequence[int],
        at: Sequence[int],
        lane: int = ANYWHERE,
        lengths: Sequence[float] = (),
    ) -> None:
        column = self._length_columns[producer]
        for consumer in at:
            heard = lengths if self.graph.nodes[consumer].length == column else ()
            state.ledgers[consumer].arrive(items, lane, heard)
            self._dispatcher.wake(state.step, consumer)

    def _items_produced(self, event: ItemsProduced) -> None:
        call = self.calls[event.call]
        assert isinstance(call.command, RunCall)
        state, node = self.steps[call.step], self.graph.nodes[call.command.node]
        self._admission.observe_bytes(node.index, len(event.items), event.num_bytes)
        lane = call.command.lanes[0]
        if node.loop is None:
            readers = self._readers[node.index]
            self._arrive(state, node.index, event.items, readers, lane, event.lengths)
        elif call.command.fused:
            self._dispatcher.alive(call)
            if event.items:
                self._come_out(state, node, event, lane)
        else:
            self._go_around(state, node, event, lane)
        if node.streaming:
            self._dispatcher.alive(call)
            self._dispatcher.hungry(call, node)
            self._units_done(state, node, _count_down(call, node, event.items))
            self._close_window(state, node)
            self._dispatcher.wake(call.step, node.index)

    def _go_around(
        self, state: StepState, node: StageNode, event: ItemsProduced, lane: int
    ) -> None:
        """Send items on to the next member of their loop, or out of it."""
        assert node.loop is not None
        spec, loop = self.graph.loops[node.loop], state.loops[node.loop]
        place = spec.members.index(node.index)
        at_the_end = place == len(spec.members) - 1
        loop.judged |= event.judged
        lengths = dict(zip(event.items, event.lengths, strict=True)) if event.lengths else {}
        leaving, staying = [], []
        asked_to_leave = set(event.leaving)
        self._release(state, state.moved_on(node, event.items))
        if at_the_end and spec.max_turns is None and not loop.judged:
            error = unjudged(self.graph, node.loop)
            self._fail(str(error), error)
            return
        # Done already, and not when the call has ended: by then an item may be back here.
        self._units_done(state, node, event.items)
        for item in event.items:
            loop.came_from[item] = node.index
            turn = loop.turns.get(item, 0) + at_the_end
            if item in asked_to_leave or (at_the_end and turn == spec.max_turns):
                loop.turns.pop(item, None)
                leaving.append(item)
            else:
                loop.turns[item] = turn
                staying.append(item)
        self._leave(state, node.loop, leaving, lane, [lengths[item] for item in leaving if lengths])
        following = spec.members[(place + 1) % len(spec.members)]
        self._arrive(state, node.index, staying, [following], lane)

    def _come_out(
        self, state: StepState, first: StageNode, event: ItemsProduced, lane: int
    ) -> None:
        """Items have been around a fused loop and have left it."""
        assert first.loop is not None
        self._release(state, state.consumed(first, event.items))
        self._units_done(state, first, event.items)
        state.loops[first.loop].came_from.update(dict.fromkeys(event.items, first.index))
        self._leave(state, first.loop, event.items, lane, event.lengths)

    def _leave(
        self,
        state: StepState,
        loop: int,
        items: Sequence[int],
        lane: int,
        lengths: Sequence[float],
    ) -> None:
        members = self.graph.loops[loop].members
        state.loops[loop].left += len(items)
        outside = [c for c in self._readers[members[-1]] if c not in members]
        self._arrive(state, members[-1], items, outside, lane, lengths)

    def _call_finished(self, event: CallFinished) -> None:
        call = self._dispatcher.finished(event.call, event.lane)
        if call is None:
            return
        state = self.steps[call.step]
        state.active_calls -= 1
        match call.command:
            case RunCall(node=index):
                self._stage_call_finished(call, self.graph.nodes[index])
            case RunFinish(node=index):
                state.finishing.discard(index)
                self._next_window(state, self.graph.nodes[index])
            case ExportWeights(source=source):
                self._ask_installs(state, source)
            case InstallWeights(source=source, target=target, version=version, lanes=lanes):
                self._admission.installed(source, target, lanes[0], version)
                state.installs -= 1
                self._wake_worker(target)
        self._complete_steps()

    def _complete_steps(self) -> None:
        """Steps are complete in order: one that has overtaken an older one waits for it."""
        for state in list(self.steps.values()):
            if state.open_nodes or state.installs or state.active_calls:
                return
            del self.steps[state.step]
            self._dispatcher.out.append(
                CompleteStep(state.step, state.step + 1, dict(state.staleness))
            )

    def _wake_worker(self, worker: str) -> None:
        for node in self._nodes_of.get(worker, ()):  # none where it only takes weights
            self._dispatcher.wake_in_all_steps(node.index)

    def _stage_call_finished(self, call: Call, node: StageNode) -> None:
        state = self.steps[call.step]
        if node.streaming:
            for unit in call.unfinished:  # fed when the call had already run dry: never started
                state.ledgers[node.index].give_back(unit)
        elif node.loop is None:
            self._units_done(state, node, call.units)
        members = (node.index,) if node.loop is None else self.graph.loops[node.loop].members
        for member in members:
            self._close_window(state, self.graph.nodes[member])
            self._dispatcher.wake(call.step, member)

    def _units_done(self, state: StepState, node: StageNode, units: Sequence[int]) -> None:
        """All outputs of units are there: inputs may go, and producers may have room again."""
        ledger = state.ledgers[node.index]
        if node.loop is None and units:
            items = ledger.items_of(units)
            self._release(state, state.consumed(node, items))
        ledger.finish(units)
        for producer in self._admission.bounded_producers(node.index):
            self._dispatcher.wake_in_all_steps(producer)

    def _release(self, state: StepState, parts: list[Part]) -> None:
        for part in parts:
            self._dispatcher.out.append(ReleaseItems(state.step, part.producer, part.items))

    def _close_window(self, state: StepState, node: StageNode) -> None:
        """Where a mini-batch (or the stage's step) is done, run `finish`, or go on."""
        ledger = state.ledgers[node.index]
        if not ledger.window_complete or node.index in state.finishing:
            return
        if node.has_finish:
            if not self._turns.may_finish(state, node):
                return
            state.finishing.add(node.index)
            lanes = self.plan.placements[node.worker].lanes
            finish = RunFinish(0, node.index, state.step, ledger.window, lanes)
            self._dispatcher.ask(Barrier(lanes, state.step, node.index, command=finish))
        else:
            self._next_window(state, node)

    def _next_window(self, state: StepState, node: StageNode) -> None:
        """A window was closed; if it was the last one, others may have waited for this stage."""
        ledger = state.ledgers[node.index]
        ledger.next_window()
        self._dispatcher.wake(state.step, node.index)
        if not ledger.complete:
            return
        state.node_done(node)
        for other in self._nodes_of[node.worker]:
            self._dispatcher.wake(state.step, other.index)
            if other.has_finish:
                self._close_window(state, other)
        if state.worker_done(node.worker):
            sources = [e.source for e in self.graph.weight_edges if e.target == node.worker]
            for worker in (node.worker, *sources):
                self._settle(state, worker)

    def _settle(self, state: StepState, worker: str) -> None:
        """Send a worker's weights out once it, and those who run on them, have done the step."""
        targets = [edge.target for edge in self.graph.weight_edges if edge.source == worker]
        if all(state.worker_done(one) for one in (worker, *targets)):
            state.settled.add(worker)
            self._wake_worker(worker)
            self._publish(state, worker, targets)

    def _publish(self, state: StepState, source: str, targets: Sequence[str]) -> None:
        lanes = [lane for target in targets for lane in self.plan.placements[target].lanes]
        state.installs += len(lanes)
        if set(lanes) <= set(self._whole_copies(source)):
            self._ask_installs(state, source)
        else:
            gang = self.plan.placements[source].replicas[0]
            export = ExportWeights(0, source, state.step + 1, gang)
            self._dispatcher.ask(Barrier(gang, state.step, SOURCE, command=export))

    def _whole_copies(self, worker: str) -> tuple[int, ...]:
        """Lanes that hold all of a worker's weights, and not a shard of them."""
        spot = self.plan.placements[worker]
        return () if any(len(gang) > 1 for gang in spot.replicas) else spot.lanes

    def _ask_installs(self, state: StepState, source: str) -> None:
        home, version = self._whole_copies(source), state.step + 1
        for edge in self.graph.weight_edges:
            if edge.source == source:
                for lane in self.plan.placements[edge.target].lanes:
                    install = InstallWeights(
                        0, source, edge.target, version, (lane,), local=lane in home
                    )
                    self._dispatcher.ask(Barrier((lane,), state.step, SOURCE, command=install))

    def _tick(self, event: Tick) -> None:
        self._dispatcher.now = event.now
        call = self._dispatcher.overdue() if event.judge else None
        if call is not None:
            self._fail(
                f"{call_name(self.graph, call.command)} has not finished within its deadline of "
                f"{self.plan.deadline_seconds:g} s"
            )

    def _fail(self, message: str, cause: BaseException | None = None) -> None:
        self.failed = True
        account = who_waits(self.graph, self.calls.values(), self.steps.values())
        self._dispatcher.out.append(FailRun("\n".join([message, *account]), cause))


def _count_down(call: Call, node: StageNode, outputs: Sequence[int]) -> list[int]:
    """Outputs of a streaming call have come; the units of which they were the last."""
    done = []
    for item in outputs:
        unit = item // node.expands
        call.unfinished[unit] -= 1
        if call.unfinished[unit] == 0:
            del call.unfinished[unit]
            done.append(unit)
    return done
