"""`StageLedger`: the record of every item of one stage in one step.

An item arrives (once from each input stream), becomes ready with its unit, is leased to a call and
is done. A replica prefers units whose payload its lane holds, and then helps itself to those of the
others; a unit that is bound to a lane (sticky) is leased to that lane only. Where lengths are known
the longest unit goes first, wherever its payload is. Every move is checked, so that delivery is
exactly-once by construction. Memory is linear in the items in flight: what is done and below the
low-water mark is a number, not a set.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.engine.homes import ANYWHERE, Homes
from m2flow.engine.ready import LongestFirst, LowestFirst
from m2flow.flow.graph import StageNode


class StageLedger:
    """Items of one stage in one step, counted in the stage's input space.

    A *unit* is the smallest set of items a call may take (item, group or step). A *window* is a
    mini-batch: units of a later window are not leased before the current one is finished.

    Args:
        node: the stage.
        num_items: how many items the step brings to it.
        homes: the lanes that hold the states of a sticky stage's items.
        sticky: whether items are bound to lanes: the stage is sticky, or heads a fused loop with a
            member that is.

    Attributes:
        unit_items: items in a unit.
        num_units: units in the step.
        window: number of the current window.
        leased: units leased and not done.
        low: every unit below this one is done.
    """

    __slots__ = (
        "_arrived",
        "_done_ahead",
        "_homes",
        "_homes_seen",
        "_inputs",
        "_leased_units",
        "_lengths",
        "_ready",
        "_waiting",
        "_window_done",
        "_window_units",
        "leased",
        "low",
        "node",
        "num_items",
        "num_units",
        "sticky",
        "unit_items",
        "window",
    )

    def __init__(
        self, node: StageNode, num_items: int, homes: Homes, *, sticky: bool = False
    ) -> None:
        self.node = node
        self.sticky = sticky
        self.num_items = num_items
        self.unit_items = {"item": 1, "group": node.group_size, "step": num_items}[node.unit]
        self.num_units = num_items // self.unit_items
        self.window = 0
        self.leased = 0
        self.low = 0
        self._window_units = self.num_units // node.minibatches
        self._window_done = 0
        self._inputs = len(node.inputs)
        self._arrived: dict[int, int] = {}
        self._lengths: dict[int, float] = {}
        self._ready: dict[int, dict[int, LowestFirst]] = {}
        self._waiting: dict[int, int] = {}
        self._leased_units: dict[int, int] = {}
        self._done_ahead: set[int] = set()
        self._homes = homes
        self._homes_seen = 0

    def arrive(
        self, items: Sequence[int], lane: int = ANYWHERE, lengths: Sequence[float] = ()
    ) -> None:
        """Input items are there; `lane` holds their payload, and each may have a length.

        A unit is as long as its items together.
        """
        needed = self.unit_items * self._inputs
        for item, length in zip(items, lengths, strict=True) if lengths else ():
            unit = item // self.unit_items
            self._lengths[unit] = self._lengths.get(unit, 0.0) + length
        for item in items:
            assert 0 <= item < self.num_items, f"{self.node.name} has no item {item}"
            unit = item // self.unit_items
            if needed > 1:
                arrived = self._arrived.get(unit, 0) + 1
                if arrived < needed:
                    self._arrived[unit] = arrived
                    continue
                self._arrived.pop(unit, None)
            self._make_ready(unit, lane)

    def _make_ready(self, unit: int, lane: int) -> None:
        if self.sticky:
            lane = self._homes.of(unit)
        elif self.node.length is not None:
            lane = ANYWHERE
        window = unit // self._window_units
        self._queue(self._ready.setdefault(window, {}), lane).push(unit)
        self._waiting[window] = self._waiting.get(window, 0) + 1

    def _queue(self, queues: dict[int, LowestFirst], lane: int) -> LowestFirst:
        queue = queues.get(lane)
        if queue is None:
            longest = self.node.length is not None
            queue = queues[lane] = LongestFirst(self._lengths) if longest else LowestFirst()
        return queue

    def ready(self, lane: int = ANYWHERE) -> int:
        """Units of the current window that wait for a call on this lane."""
        if not self.sticky:
            return self._waiting.get(self.window, 0)
        self._send_home()
        queues = self._ready.get(self.window, {})
        return sum(len(queues.get(place, ())) for place in {ANYWHERE, lane})

    def _send_home(self) -> None:
        """Queue units again that other stages have bound to a lane since they became ready."""
        if len(self._homes) == self._homes_seen:
            return
        self._homes_seen = len(self._homes)
        for queues in self._ready.values():
            unbound = queues.pop(ANYWHERE, None)
            for unit in unbound.drain() if unbound is not None else ():
                self._queue(queues, self._homes.of(unit)).push(unit)

    def lease(self, lane: int, amount: int, end: int) -> list[int]:
        """Lease units that wait for a call on this lane: its own first, in the order of the queue.

        Args:
            lane: who takes them (the first lane of a gang).
            amount: the most to lease.
            end: units from this one up are not admitted.
        """
        if self.sticky:
            self._send_home()
        queues = self._ready.get(self.window, {})
        others = [] if self.sticky else [other for other in queues if other != ANYWHERE]
        units: list[int] = []
        for place in dict.fromkeys((lane, ANYWHERE, *others)):
            queue = queues.get(place)
            if queue is None:
                continue
            for unit in queue.take(amount - len(units), end):
                assert unit not in self._leased_units, f"{self.node.name}: {unit} was leased twice"
                self._leased_units[unit] = place
                units.append(unit)
            if not queue:
                del queues[place]
            if len(units) == amount:
                break
        if self.sticky:
            for unit in units:
                self._homes.bind(unit, lane)
            self._homes_seen = len(self._homes)
        if units:
            self._waiting[self.window] -= len(units)
        self.leased += len(units)
        return sorted(units)

    def give_back(self, unit: int) -> None:
        """A leased unit was not worked on after all: it is ready again, where it was."""
        self.leased -= 1
        self._make_ready(unit, self._leased_units.pop(unit))

    def finish(self, units: Sequence[int]) -> None:
        """Leased units are done."""
        self._end_lease(units)
        self._window_done += len(units)
        for unit in units:
            self._mark_done(unit)
            if self._lengths:
                self._lengths.pop(unit, None)

    def _end_lease(self, units: Sequence[int]) -> None:
        for unit in units:
            del self._leased_units[unit]
        self.leased -= len(units)

    def _mark_done(self, unit: int) -> None:
        self._done_ahead.add(unit)
        while self.low in self._done_ahead:
            self._done_ahead.remove(self.low)
            self.low += 1

    @property
    def nothing_more_comes(self) -> bool:
        """Whether every unit of the current window is ready, leased or done."""
        waiting = self._waiting.get(self.window, 0)
        return waiting + self.leased + self._window_done == self._window_units

    @property
    def window_complete(self) -> bool:
        return not self.complete and self._window_done == self._window_units

    def next_window(self) -> None:
        """Go on to the next mini-batch."""
        assert self.window_complete
        self._ready.pop(self.window, None)
        self._waiting.pop(self.window, None)
        self.window += 1
        self._window_done = 0

    @property
    def complete(self) -> bool:
        """Whether every window of the step is done."""
        return self.window == self.node.minibatches

    @property
    def work_left(self) -> bool:
        """Whether calls of this stage are still to be started in the step, its `finish` too."""
        if self.complete:
            return False
        over = self.window * self._window_units + self._window_done + self.leased
        return over < self.num_units or self.node.has_finish

    @property
    def low_item(self) -> int:
        """Every input item below this one is done."""
        return self.low * self.unit_items

    @property
    def in_flight(self) -> int:
        """Entries this ledger keeps; what its memory is linear in."""
        return (
            sum(self._waiting.values()) + len(self._arrived) + self.leased + len(self._done_ahead)
        )

    def items_of(self, units: Sequence[int]) -> Sequence[int]:
        """The items of some units, in the order of these."""
        size = self.unit_items
        if size == 1:
            return units
        return [item for unit in units for item in range(unit * size, (unit + 1) * size)]


class LoopState:
    """What the members of one loop share in one step.

    Attributes:
        total: items that will enter.
        waiting: items that wait at some member for a call.
        left: items that have left.
        leased: items that a member, or the whole loop where it is fused, is working on.
        fused: whether a call takes an item all the way to where it leaves.
        judged: whether a member has said of its items which of them leave.
        turns: for an item inside, how often it has gone around.
        came_from: the stage whose output an item last was (kept until the step ends, because it
            also says where an item that has left is to be read).
    """

    __slots__ = ("came_from", "fused", "judged", "leased", "left", "total", "turns", "waiting")

    def __init__(self, total: int, *, fused: bool = False) -> None:
        self.total = total
        self.fused = fused
        self.judged = False
        self.waiting = 0
        self.left = 0
        self.leased = 0
        self.turns: dict[int, int] = {}
        self.came_from: dict[int, int] = {}


class LoopLedger(StageLedger):
    """Items of one member of a loop, where an item comes back until it leaves.

    A unit is an item and there is one window, complete when every item has left the loop. `low`
    counts items that have passed this member at least once: the bound on the edge that leads in.
    """

    __slots__ = ("loop",)

    def __init__(
        self,
        node: StageNode,
        num_items: int,
        homes: Homes,
        loop: LoopState,
        *,
        sticky: bool = False,
    ) -> None:
        super().__init__(node, num_items, homes, sticky=sticky)
        self.loop = loop

    def arrive(
        self, items: Sequence[int], lane: int = ANYWHERE, lengths: Sequence[float] = ()
    ) -> None:
        self.loop.waiting += len(items)
        for item in items:
            self._make_ready(item, lane)

    def lease(self, lane: int, amount: int, end: int) -> list[int]:
        units = super().lease(lane, amount, end)
        self.loop.waiting -= len(units)
        self.loop.leased += len(units)
        return units

    def give_back(self, unit: int) -> None:
        super().give_back(unit)
        self.loop.waiting += 1
        self.loop.leased -= 1

    def finish(self, units: Sequence[int]) -> None:
        self._end_lease(units)
        self.loop.leased -= len(units)
        for unit in units:
            if unit >= self.low and unit not in self._done_ahead:
                self._mark_done(unit)

    @property
    def nothing_more_comes(self) -> bool:
        """Whether every item that is still in the loop, or will be, waits at some member.

        In a fused loop those that are worked on do not come back.
        """
        loop = self.loop
        return loop.waiting + loop.left + (loop.leased if loop.fused else 0) == loop.total

    @property
    def work_left(self) -> bool:
        return not self.complete and self.loop.left < self.loop.total

    @property
    def window_complete(self) -> bool:
        return not self.complete and self.loop.left == self.loop.total
