"""Items that go around the members of a loop until they leave.

A loop may run *fused*: around and around on one lane, with no trip to the controller. That is where
the plan allows it, all of its members' workers stand on the same single lanes, fit there together
(the limit of a lane is kept), and at most one of them binds items to lanes: an item can then be
handed to a lane once, and stay there until it has left the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from m2flow.engine.directory import Homes
from m2flow.engine.ledger import LEASED, READY, WAITING, StageLedger
from m2flow.engine.plan import Plan
from m2flow.engine.ready import LongestFirst, LowestFirst
from m2flow.errors import FlowError
from m2flow.flow.graph import FlowGraph, StageNode


class LoopState:
    """What the members of one loop share in one step.

    Attributes:
        entry: the first member, and the stream from which items enter.
        total: items that will enter.
        ready: items that wait at some member for a call.
        left: items that have left.
        leased: items that a member, or the whole loop where it is fused, is working on.
        fused: whether a call takes an item all the way to where it leaves.
        judged: whether a member has said of its items which of them leave.
        turns: for an item inside, how often it has gone around.
        came_from: the stage whose output an item last was (kept until the step ends, because it
            also says where an item that has left is to be read).
    """

    __slots__ = (
        "came_from",
        "entry",
        "fused",
        "judged",
        "leased",
        "left",
        "ready",
        "total",
        "turns",
    )

    def __init__(self, first: StageNode, total: int, *, fused: bool = False) -> None:
        self.entry = first.index, first.inputs[0]
        self.total = total
        self.fused = fused
        self.judged = False
        self.ready = 0
        self.left = 0
        self.leased = 0
        self.turns: dict[int, int] = {}
        self.came_from: dict[int, int] = {}

    def has_left(self, item: int) -> bool:
        """Whether an item has gone around as often as it was to."""
        return item in self.came_from and item not in self.turns


class LoopLedger(StageLedger):
    """Items of one member of a loop, where an item comes back until it leaves.

    A unit is an item and there is one window, complete when every item has left the loop. `low`
    counts items that have passed this member at least once: the bound on the edge that leads in.
    Items that have gone around most often are taken first: they are the nearest to their end.
    """

    __slots__ = ("_passed", "loop")

    def __init__(
        self,
        node: StageNode,
        num_items: int,
        place: Callable[[int], int],
        homes: Homes,
        loop: LoopState,
        *,
        sticky: bool = False,
    ) -> None:
        super().__init__(node, num_items, place, homes, sticky=sticky)
        self.loop = loop
        self._passed = bytearray(num_items)

    def _queue(self, queues: dict[int, LowestFirst], lane: int) -> LowestFirst:
        if lane not in queues:
            queues[lane] = LongestFirst(self.loop.turns)
        return queues[lane]

    def arrive(self, stream: int, items: Sequence[int], lengths: Sequence[float] = ()) -> bool:
        if self.loop.entry == (self.node.index, stream):  # some may have entered long ago
            items = [item for item in items if not self._passed[item]]
        return super().arrive(stream, items, lengths)

    def _make_ready(self, units: Sequence[int]) -> None:
        super()._make_ready(units)
        self.loop.ready += len(units)

    def lease(self, lane: int, amount: int, end: int) -> list[int]:
        units = super().lease(lane, amount, end)
        self.loop.ready -= len(units)
        self.loop.leased += len(units)
        return units

    def _end_lease(self, units: Sequence[int], then: int) -> None:
        super()._end_lease(units, then)
        self.loop.leased -= len(units)

    def finish(self, units: Sequence[int]) -> None:
        self._end_lease(units, WAITING)
        for unit in units:
            self._passed[unit] = 1
        while self.low < self.num_units and self._passed[self.low]:
            self.low += 1

    def skip(self, units: Sequence[int]) -> None:
        """Items need not go around: they are there as they left the loop."""
        self.loop.leased += len(units)
        super().skip(units)

    def _withdraw(self, units: Collection[int]) -> None:
        super()._withdraw(units)
        self.loop.ready -= len(units)

    def take_out(self, item: int) -> None:
        """An item begins anew at the loop's entry, wherever it was."""
        if self._status[item] == READY:
            self._withdraw((item,))
        elif self._status[item] == LEASED:
            self._end_lease((item,), WAITING)
        self._passed[item] = 0
        self.low = min(self.low, item)

    def reenter(self, item: int) -> None:
        """An item is at the loop's entry again, where it can be read."""
        self._make_ready((item,))

    def reopen_loop(self) -> bool:
        """An item that had left is inside again. Whether the member was complete."""
        was_complete = self.complete
        self.window = 0
        return was_complete

    @property
    def nothing_more_comes(self) -> bool:
        """Whether every item that is still in the loop, or will be, waits at some member.

        In a fused loop those that are worked on do not come back.
        """
        loop = self.loop
        return loop.ready + loop.left + (loop.leased if loop.fused else 0) == loop.total

    @property
    def window_complete(self) -> bool:
        return not self.complete and self.loop.left == self.loop.total

    def has_read(self, item: int) -> bool:
        return bool(self._passed[item])


def fused_loops(graph: FlowGraph, plan: Plan) -> frozenset[int]:
    """Numbers of the loops that run fused under this plan."""
    if not plan.fuse_loops:
        return frozenset()
    loops = range(len(graph.loops))
    return frozenset(loop for loop in loops if _can_be_fused(graph, plan, loop))


def sticky_member(graph: FlowGraph, loop: int) -> StageNode | None:
    """A member that binds items to lanes; in a fused loop all such members have one worker."""
    members = (graph.nodes[index] for index in graph.loops[loop].members)
    return next((node for node in members if node.sticky), None)


def _can_be_fused(graph: FlowGraph, plan: Plan, loop: int) -> bool:
    members = [graph.nodes[index] for index in graph.loops[loop].members]
    spots = {node.worker: plan.placements[node.worker] for node in members}
    first = spots[members[0].worker]
    if any(len(gang) > 1 for gang in first.replicas):
        return False
    if any(set(spot.replicas) != set(first.replicas) for spot in spots.values()):
        return False
    if len({node.worker for node in members if node.sticky}) > 1:
        return False
    needed = sum(spot.state_bytes for spot in spots.values())
    needed += max(spot.working_bytes for spot in spots.values())
    limits = {lane.id: lane.memory_bytes for lane in plan.lanes}
    return all((limit := limits[lane]) is None or needed <= limit for lane in first.lanes)


def unjudged(graph: FlowGraph, loop: int) -> FlowError:
    """What is wrong with a loop that nothing would ever leave."""
    return FlowError(
        f"no stage has given the column {graph.loops[loop].until!r} in a full turn, so nothing "
        "would ever leave",
        key=graph.loop_name(loop),
        hint="give the column, name another one by `until`, or set `max_turns`",
    )
