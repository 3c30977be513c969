"""`EngineState`: all that an engine knows, in one place; `Engine` and its parts share it.

What follows from graph and plan alone is worked out once (`members`, `workers`, `gangs`, ...); the
rest changes with events. A stage that may have something to start in a step is *woken*; what is
not woken is not looked at, so that the work is linear in what happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from m2flow.engine.admission import Admission
from m2flow.engine.calls import Call
from m2flow.engine.lanes import LaneBoard
from m2flow.engine.loops import fused_loops
from m2flow.engine.messages import Command, ReleaseItems, RunCall
from m2flow.engine.plan import Plan, StagePlan
from m2flow.engine.residency import Residency
from m2flow.engine.steps import StepState
from m2flow.engine.turns import Turns
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode


class EngineState:
    """The state of one engine.

    Args:
        graph, plan, first_step, residency, heals: as for `Engine`.

    Attributes:
        fused: numbers of the loops that run fused.
        groups: of those with a stage that waits, where the plan deals their items into groups, the
            first member and the items of a group.
        steps: the steps in flight, oldest first.
        calls: the calls in progress by number, silent longest first.
        out: the commands of the event at hand, in order.
        now: seconds of the engine's clock.
        failed: whether the run was stopped.
        lost: lanes that are down.
        epochs: by lane, where it is not 0.
        last_call: number of the newest call.
        last_call_on: by lane, the newest call there.
        hungry: (step, node) to the streaming calls that may have room for more items.
        wanted_gangs: (step, node, replica) of gangs for which lanes are held.
        stage_plans, members, workers: by stage; the stages that a call of it runs (of a fused loop
            the first member runs all), and those of their workers that take memory.
        preferred: the stages, most preferred first.
        nodes_on_lane: lane to stages, most preferred first.
        nodes_of: worker to its stages.
        readers: stream to the stages that read it.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        first_step: int,
        residency: Residency | None,
        heals: bool,
    ) -> None:
        self.graph, self.plan, self.heals = graph, plan, heals
        self.fused = fused_loops(graph, plan)
        self.groups = dict(_group_sizes(graph, plan, self.fused))
        self.steps: dict[int, StepState] = {}
        self.calls: dict[int, Call] = {}
        self.out: list[Command] = []
        self.now = 0.0
        self.failed = False
        self.lost: set[int] = set()
        self.epochs: dict[int, int] = {}
        self.last_call = 0
        self.last_call_on: dict[int, Call] = {}
        self.hungry: dict[tuple[int, int], dict[int, Call]] = {}
        self.wanted_gangs: set[tuple[int, int, int]] = set()
        self.replicas = {worker: plan.placements[worker].replicas for worker in graph.workers}
        self.board = LaneBoard([lane.id for lane in plan.lanes], self.replicas)
        self.admission = Admission(graph, plan, first_step)
        self.turns = Turns(graph)
        self.residency = residency or Residency(plan)
        self.stage_plans = [plan.stages.get(node.name, StagePlan()) for node in graph.nodes]
        self.members = [_members_of_call(graph, node, self.fused) for node in graph.nodes]
        self.workers = [_workers_of_call(plan, members) for members in self.members]
        order = {name: place for place, name in enumerate(plan.order)}
        self.preferred = sorted(graph.nodes, key=lambda n: (order.get(n.name, len(order)), n.index))
        self._preference = {node.index: place for place, node in enumerate(self.preferred)}
        self._woken: dict[tuple[int, int], None] = {}  # (step, place in order of preference)
        self.nodes_on_lane: dict[int, list[int]] = {lane.id: [] for lane in plan.lanes}
        for node in self.preferred:
            for lane in plan.placements[node.worker].lanes:
                self.nodes_on_lane[lane].append(node.index)
        self.nodes_of = {w: [n for n in graph.nodes if n.worker == w] for w in graph.workers}
        streams = range(SOURCE, len(graph.nodes))
        self.readers = {
            s: [node.index for node in graph.nodes if s in node.inputs] for s in streams
        }
        self.length_columns = {stream: graph.length_column(stream) for stream in streams}

    # --- stages that may have something to start ----------------------------------------------

    def wake(self, step: int, node: int) -> None:
        """A stage may have something to start in this step."""
        self._woken[step, self._preference[node]] = None

    def wake_in_all_steps(self, node: int) -> None:
        """A stage may have something to start in any step."""
        place = self._preference[node]
        for step in self.steps:
            self._woken[step, place] = None

    def wake_all(self) -> None:
        """Any stage may have something to start in any step."""
        for node in self._preference:
            self.wake_in_all_steps(node)

    def take_woken(self) -> list[tuple[int, StageNode]]:
        """(step, stage) of all that was woken: older steps first, then as the plan prefers."""
        woken = sorted(self._woken)
        self._woken.clear()
        return [(step, self.preferred[place]) for step, place in woken]

    @property
    def any_woken(self) -> bool:
        return bool(self._woken)

    # --- lanes and calls ----------------------------------------------------------------------

    def free(self, lane: int) -> None:
        """A lane has nothing to do: whatever stands on it may have something."""
        if lane in self.lost:
            return
        self.board.free(lane)
        for index in self.nodes_on_lane[lane]:
            self.wake_in_all_steps(index)

    def new_call(self) -> int:
        """A number for a call; none is used twice."""
        self.last_call += 1
        return self.last_call

    def forget_call(self, call: Call) -> None:
        """All lanes of a call have answered; they are free for others."""
        del self.calls[call.command.call]
        self.steps[call.step].active_calls -= 1
        for lane in call.command.lanes:
            self.free(lane)

    def heard_of(self, call: Call) -> None:
        """A call has handed items on, or was given some."""
        call.heard = self.now
        number = call.command.call
        self.calls[number] = self.calls.pop(number)

    def may_have_room(self, call: Call, node: StageNode) -> None:
        """A streaming call may have room for more items, unless a lane of it has ended already."""
        fed = self.stage_plans[node.index].max_running is not None
        if fed and not call.disturbed and len(call.running) == len(call.command.lanes):
            self.hungry.setdefault((call.step, node.index), {})[call.command.call] = call

    def takes_no_more(self, call: Call) -> None:
        """A streaming call is fed no more."""
        assert isinstance(call.command, RunCall)
        key = (call.step, call.command.node)
        calls = self.hungry.get(key)
        if calls is not None:
            calls.pop(call.command.call, None)
            if not calls:
                del self.hungry[key]

    # --- payloads -----------------------------------------------------------------------------

    def release(
        self,
        state: StepState,
        producer: int,
        items: Sequence[int],
        also: Sequence[int] = (),
        but: Sequence[int] = (),
    ) -> None:
        """Nobody will read items any more: have the lanes that hold them let them go.

        Args:
            also: lanes that have read them.
            but: lanes where newer payloads of the same name are already in their place.
        """
        if not items:
            return
        for lanes, some in state.directory.release(producer, items, also).items():
            if but or self.lost:
                lanes = tuple(x for x in lanes if x not in but and x not in self.lost)
            if lanes:
                self._let_go(state, producer, some, lanes)

    def _let_go(
        self, state: StepState, producer: int, items: Sequence[int], lanes: tuple[int, ...]
    ) -> None:
        self.out.append(ReleaseItems(state.step, producer, tuple(items), lanes))
        for lane in lanes if self.heals else ():
            call = self.last_call_on.get(lane)
            if call is None or lane not in call.running:
                continue
            made_by = call.command.node if isinstance(call.command, RunCall) else SOURCE
            if (made_by, call.step) == (producer, state.step):
                call.void.update(items)

    def discard(self, state: StepState, producer: int, items: Sequence[int], lane: int) -> None:
        """A lane has made items in vain: have it let them go where it is not to hold them."""
        there = state.directory
        some = tuple(item for item in items if not there.is_at(producer, item, lane))
        if some:
            self._let_go(state, producer, some, (lane,))


def _group_sizes(graph: FlowGraph, plan: Plan, fused: frozenset[int]) -> Iterator[tuple[int, int]]:
    """The first members of fused loops with a stage that waits, and the items of a group there."""
    for loop in fused:
        members = [graph.nodes[index] for index in graph.loops[loop].members]
        chunks = [plan.stages.get(node.name, StagePlan()).chunk for node in members]
        if any(node.waits for node in members) and any(chunks):
            yield members[0].index, min(filter(None, chunks))


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
