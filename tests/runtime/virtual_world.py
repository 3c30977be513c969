"""The world of a crash schedule: its time, its disk, and the dice by which something breaks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, ClassVar

from m2flow.engine.messages import CompleteStep
from m2flow.engine.plan import Plan
from m2flow.flow import Batch, FlowGraph
from m2flow.flow.rollouts import Rollouts, rollout_stages

if TYPE_CHECKING:
    from tests.runtime.shared_calls import SharedCall
    from tests.runtime.virtual_lanes import LaneProcess

DOWN_SECONDS = 40.0
"""For about so long a machine is gone that comes back."""


class LauncherLost(BaseException):
    """The launcher's process ends here; nobody there catches anything."""


@dataclass
class Faults:
    """What goes wrong in a schedule; chances are those at each thing that happens.

    Attributes:
        twice, late: of an event, to be heard twice, or again much later.
        lose: of a lane to be lost.
        half_open: of those on another machine, to fall silent and work on.
        machine: of those, to go with their machine, for a while or for ever.
        launcher: of the launcher to be lost.
        slow: of a lane to take eight times as long for everything.
        disk: factor by which the disk is slow.
        full: of a snapshot, to find no room.
        stillborn: of a lane's new process, to end before it is up.
        most: lanes that are lost, at most.
        elastic: whether the run goes on without lanes that cannot be started again.
    """

    twice: float = 0.0
    late: float = 0.0
    lose: float = 0.0
    half_open: float = 0.0
    machine: float = 0.0
    launcher: float = 0.0
    slow: float = 0.0
    disk: float = 1.0
    full: float = 0.0
    stillborn: float = 0.0
    most: int = 4
    elastic: bool = False


@dataclass
class WorkerState:
    """What a worker is on a lane.

    Attributes:
        learnt: by accumulating stage, the mini-batches of all steps whose `finish` it has run.
        versions: by source, that of the weights that are installed.
    """

    learnt: dict[int, int]
    versions: dict[str, int]
    nbytes: ClassVar[int] = 1

    def clone(self) -> WorkerState:
        return WorkerState(dict(self.learnt), dict(self.versions))


class World:
    """Time, disk and dice of one schedule.

    Args:
        graph, plan, num_items: what is run; `plan` is that of the moment.
        faults: what goes wrong.
        dice: draws all of it.

    Attributes:
        now: seconds.
        first_step: with which the launcher of the moment has begun.
        lanes: the newest process of each lane.
        gone: machine to when it is back.
        disk: rollouts that have been written.
        struck: how often each lane was lost, or has not come up.
        failed_starts: how often each lane has not come up since the launcher has begun.
        without_room: whether a snapshot has found no room since then.
        shared: by number the calls that lanes carry out together.
    """

    def __init__(
        self, graph: FlowGraph, plan: Plan, num_items: int, faults: Faults, dice: random.Random
    ) -> None:
        self.graph, self.plan, self.num_items = graph, plan, num_items
        self.faults, self.dice = faults, dice
        self.now, self.first_step = 1.0, 0
        self.lanes: dict[int, LaneProcess] = {}
        self.gone: dict[int, float] = {}
        self.disk: list[Rollouts] = []
        self.struck: Counter[int] = Counter()
        self.failed_starts: Counter[int] = Counter()
        self.without_room = False
        self._struck_before: Counter[int] = Counter()
        self._begun = 0.0  # the launcher of the moment
        self.events: Counter[str] = Counter()
        self.shared: dict[int, SharedCall] = {}
        self.slow = {lane.id for lane in plan.lanes if dice.random() < faults.slow}
        self.nodes = {lane.id: lane.node for lane in plan.lanes}
        self.rollouts = {member: one for one in rollout_stages(graph) for member in one.members}
        self._ahead: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._idle = self._things = 0

    def begin_anew(self) -> None:
        """The launcher is lost, and all lanes with it; the disk has what it has."""
        for lane in self.lanes.values():
            lane.up = False
        self.lanes.clear()
        self._ahead.clear()
        self.failed_starts.clear()
        self.without_room, self._struck_before = False, self.struck.copy()
        self._begun = self.now

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        """Have something happen later."""
        heappush(self._ahead, (self.now + seconds, next(self._order), do))

    def advance(self, until: float) -> bool:
        """Go on to what happens next, or to a moment; whether something has happened."""
        if not self._ahead or self._ahead[0][0] > until:
            self.now = max(self.now, until)
            self._idle = 0 if self._ahead else self._idle + 1
            assert self._idle < 1000, "everybody waits for ever"
            return False
        self._idle, self._things = 0, self._things + 1
        assert self._things < 200_000, "it goes on for ever"
        self.now, _, do = heappop(self._ahead)
        do()
        self._break_something()
        return True

    def sleep(self, seconds: float) -> None:
        """The launcher waits, and hears nothing."""
        until = self.now + seconds
        while self.advance(until):
            pass

    def seconds(self) -> float:
        """What something takes: nothing, as long as others, or much longer."""
        dice = self.dice
        return dice.choice((0.0, 0.02, 0.02, dice.random() * 0.02, dice.random() * 0.06, 0.4))

    def disk_seconds(self) -> float:
        return self.seconds() * self.faults.disk

    # --- what breaks ------------------------------------------------------------------------------

    def _break_something(self) -> None:
        faults, dice = self.faults, self.dice
        if self.events["launchers lost"] < 2 and dice.random() < faults.launcher:
            self.events["launchers lost"] += 1
            raise LauncherLost
        if self.struck.total() >= faults.most:
            return
        if not any(lane.is_heard for lane in self.lanes.values()) or dice.random() >= faults.lose:
            return
        lane = dice.choice([lane for lane in self.lanes.values() if lane.is_heard])
        node = self.nodes[lane.number]
        if node and dice.random() < faults.machine:
            self._lose_machine(node)
        elif node and dice.random() < faults.half_open:
            self.strike(lane.number, "lines half open")
            lane.line.fall_silent()
        else:
            self.strike(lane.number, "lanes killed")
            lane.die("killed")

    def strike(self, lane: int, how: str) -> None:
        """Count a lane that is lost."""
        self.struck[lane] += 1
        self.events["lanes lost"] += 1
        self.events[how] += 1

    def _lose_machine(self, node: int) -> None:
        self.events["machines lost"] += 1
        for_ever = self.dice.random() < 0.3
        self.gone[node] = float("inf") if for_ever else self.now + self.dice.random() * DOWN_SECONDS
        for lane in self.lanes.values():
            if self.nodes[lane.number] == node and lane.up:
                if not lane.line.silent:
                    self.strike(lane.number, "lanes gone with their machine")
                lane.die("its machine is gone", silently=True)

    def is_gone(self, lane: int) -> bool:
        """Whether the machine of a lane is gone."""
        return self.now < self.gone.get(self.nodes[lane], 0.0)

    def was_gone(self, lane: int) -> bool:
        """Whether the machine of a lane was gone since the launcher of the moment has begun."""
        return self._begun < self.gone.get(self.nodes[lane], 0.0)

    def struck_since(self, lane: int) -> int:
        """How often the launcher of the moment has lost a lane, or seen it not come up."""
        return self.struck[lane] - self._struck_before[lane]

    # --- what workers are -------------------------------------------------------------------------

    def as_loaded(self, worker: str) -> WorkerState:
        """What a worker is that is loaded: as the run has begun."""
        return WorkerState(
            {
                node.index: self.first_step * node.minibatches
                for node in self.graph.nodes
                if node.worker == worker and node.has_finish
            },
            {e.source: self.first_step for e in self.graph.weight_edges if e.target == worker},
        )

    def check_settled(self, state: WorkerState, step: int) -> None:
        """A state is the one between a step and the step before."""
        for index, windows in state.learnt.items():
            wanted = step * self.graph.nodes[index].minibatches
            assert windows == wanted, f"{windows} mini-batches of {index} before step {step}"

    def check_complete(self, command: CompleteStep) -> None:
        """A step is over: all of it has been folded in, and is held in the version that is said."""
        step = command.step
        assert command.version == step + 1
        assert max(command.staleness, default=0) <= self.plan.max_staleness
        assert min(command.staleness, default=0) >= 0
        for node in self.graph.nodes:
            there = [self.lanes[lane] for lane in self.plan.placements[node.worker].lanes]
            if not node.accumulates or not all(lane.up for lane in there):
                continue  # of a lane that is lost it will be heard
            folded = [x for lane in there for x in lane.folded.pop((step, node.index), ())]
            if not node.has_finish:
                assert sorted(folded) == list(range(self.num_items * node.fanout)), node.name
                continue
            assert not folded, f"{node.name} has not learnt from {folded}"
            for lane in there:
                learnt = lane.states[node.worker].learnt if node.worker in lane.states else {}
                wanted = (step + 1) * node.minibatches
                assert learnt.get(node.index, wanted) >= wanted

    def length(self, producer: int, step: int, item: int) -> float:
        return float((producer * 7 + step * 5 + item * 3) % 4)

    def batch(self, producer: int, step: int, items: Sequence[int]) -> Batch:
        """The payload of some items."""
        return Batch({"length": [self.length(producer, step, x) for x in items]}, items)
