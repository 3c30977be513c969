"""`StageLedger`: the record of every item of one stage in one step.

An item arrives (once from each input stream), becomes ready with its unit, is leased to a call and
is done. A replica prefers units whose payload its lane holds, and then helps itself to those of the
others; a unit that is bound to a lane (sticky) is leased to that lane only. Every move is checked,
so that delivery is exactly-once by construction. Memory is linear in the items in flight: what is
done and below the low-water mark is a number, not a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from m2flow.engine.homes import ANYWHERE, Homes
from m2flow.flow.graph import StageNode


class StageLedger:
    """Items of one stage in one step, counted in the stage's input space.

    A *unit* is the smallest set of items a call may take (item, group or step). A *window* is a
    mini-batch: units of a later window are not leased before the current one is finished.

    Args:
        node: the stage.
        num_items: how many items the step brings to it.
        homes: for a sticky stage, the lanes that hold its items' states.

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
        "_ready",
        "_waiting",
        "_window_done",
        "_window_units",
        "leased",
        "low",
        "node",
        "num_items",
        "num_units",
        "unit_items",
        "window",
    )

    def __init__(self, node: StageNode, num_items: int, homes: Homes) -> None:
        self.node = node
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
        self._ready: dict[int, dict[int, list[int]]] = {}
        self._waiting: dict[int, int] = {}
        self._leased_units: dict[int, int] = {}
        self._done_ahead: set[int] = set()
        self._homes = homes
        self._homes_seen = 0

    def arrive(self, items: Sequence[int], lane: int = ANYWHERE) -> None:
        """Input items are there; `lane` holds their payload."""
        needed = self.unit_items * self._inputs
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
        if self.node.sticky:
            lane = self._homes.of(unit)
        window = unit // self._window_units
        heappush(self._ready.setdefault(window, {}).setdefault(lane, []), unit)
        self._waiting[window] = self._waiting.get(window, 0) + 1

    def ready(self, lane: int = ANYWHERE) -> int:
        """Units of the current window that wait for a call on this lane."""
        if not self.node.sticky:
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
            for unit in queues.pop(ANYWHERE, ()):
                heappush(queues.setdefault(self._homes.of(unit), []), unit)

    def lease(self, lane: int, amount: int, end: int) -> list[int]:
        """Lease units that wait for a call on this lane: its own first, the lowest first.

        Args:
            lane: who takes them (the first lane of a gang).
            amount: the most to lease.
            end: units from this one up are not admitted.
        """
        if self.node.sticky:
            self._send_home()
        queues = self._ready.get(self.window, {})
        others = [] if self.node.sticky else [other for other in queues if other != ANYWHERE]
        units: list[int] = []
        for place in dict.fromkeys((lane, ANYWHERE, *others)):
            for unit in _pop(queues, place, amount - len(units), end):
                assert unit not in self._leased_units, f"{self.node.name}: {unit} was leased twice"
                self._leased_units[unit] = place
                units.append(unit)
        if self.node.sticky:
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
    def low_item(self) -> int:
        """Every input item below this one is done."""
        return self.low * self.unit_items

    @property
    def in_flight(self) -> int:
        """Entries this ledger keeps; what its memory is linear in."""
        return (
            sum(self._waiting.values()) + len(self._arrived) + self.leased + len(self._done_ahead)
        )

    def items_of(self, unit: int) -> range:
        return range(unit * self.unit_items, (unit + 1) * self.unit_items)


def _pop(queues: dict[int, list[int]], lane: int, amount: int, end: int) -> list[int]:
    """Up to `amount` units below `end` from one lane's heap, lowest first."""
    heap = queues.get(lane)
    units: list[int] = []
    while heap and len(units) < amount and heap[0] < end:
        units.append(heappop(heap))
    if heap is not None and not heap:
        del queues[lane]
    return units


class LoopState:
    """What the members of one loop share in one step.

    Attributes:
        total: items that will enter.
        waiting: items that wait at some member for a call.
        left: items that have left.
        leased: items that a member is working on.
        turns: for an item inside, how often it has gone around.
        came_from: the stage whose output an item last was (kept until the step ends, because it
            also says where an item that has left is to be read).
    """

    __slots__ = ("came_from", "leased", "left", "total", "turns", "waiting")

    def __init__(self, total: int) -> None:
        self.total = total
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

    def __init__(self, node: StageNode, num_items: int, homes: Homes, loop: LoopState) -> None:
        super().__init__(node, num_items, homes)
        self.loop = loop

    def arrive(self, items: Sequence[int], lane: int = ANYWHERE) -> None:
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
        """Whether every item that is still in the loop, or will be, waits at some member."""
        return self.loop.waiting + self.loop.left == self.loop.total

    @property
    def window_complete(self) -> bool:
        return not self.complete and self.loop.left == self.loop.total
