"""`StageLedger`: the record of every unit of one stage in one step.

A unit waits for its input items, is ready once all of them have arrived, is leased to a call and
is done. An item that arrives twice on an input changes nothing. A replica prefers units whose
payload its lane holds, and then helps itself to those of the others; a unit that is bound to a lane
(sticky) is leased to that lane only. Where lengths are known the longest unit goes first, wherever
its payload is. What a lost lane takes with it is undone by `depart` (inputs) and `reopen` (units).

Memory is a byte for each unit, and where a unit needs several arrivals one for each of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence

from m2flow.engine.directory import ANYWHERE, Homes
from m2flow.engine.ready import LongestFirst, LowestFirst
from m2flow.flow.graph import StageNode

WAITING, READY, LEASED, DONE = range(4)
"""What a unit can be."""


class StageLedger:
    """Items of one stage in one step, counted in the stage's input space.

    A *unit* is the smallest set of items a call may take (item, group or step). A *window* is a
    mini-batch: units of a later window are not leased before the current one is finished. Units
    fill the windows by their number or, if the stage says so, as they become ready for the first
    time; they stay in their window, whatever is lost.

    Args:
        node: the stage.
        num_items: how many items the step brings to it.
        place: the lane that holds an input item (the directory's word), where units are queued.
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
        "_doers",
        "_homes",
        "_homes_seen",
        "_lengths",
        "_missing",
        "_num_ready",
        "_place",
        "_ready",
        "_status",
        "_window_done",
        "_window_of",
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
        self,
        node: StageNode,
        num_items: int,
        place: Callable[[int], int],
        homes: Homes,
        *,
        sticky: bool = False,
    ) -> None:
        self.node = node
        self.sticky = sticky
        self.num_items = num_items
        self.unit_items = node.unit_items(num_items)
        self.num_units = num_items // self.unit_items
        self.window = 0
        self.leased = 0
        self.low = 0
        self._doers = array("i", [-1] * self.num_units if node.accumulates else ())
        self._window_units = self.num_units // node.minibatches
        self._window_done = 0
        self._window_of: dict[int, int] | None = {} if node.by_arrival else None
        self._status = bytearray(self.num_units)
        needed = self.unit_items * len(node.inputs)
        several = needed > 1  # or the unit's status says whether its one item has arrived
        self._arrived = [bytearray(num_items) for _ in node.inputs] if several else []
        self._missing = array("i", [needed]) * self.num_units if several else array("i")
        self._lengths: dict[int, float] = {}
        self._ready: dict[int, dict[int, LowestFirst]] = {}
        self._num_ready: dict[int, int] = {}
        self._place, self._homes, self._homes_seen = place, homes, 0

    # --- arrivals -----------------------------------------------------------------------------

    def arrive(self, stream: int, items: Sequence[int], lengths: Sequence[float] = ()) -> bool:
        """Items of an input stream are there; each may have a length.

        A unit is as long as its items together. Returns whether any unit has become ready.
        """
        status, size, ready = self._status, self.unit_items, []
        if not self._arrived:
            for place, item in enumerate(items):
                assert 0 <= item < self.num_items, f"{self.node.name} has no item {item}"
                if status[item] == WAITING:
                    if lengths:
                        self._lengths[item] = lengths[place]
                    status[item] = READY
                    ready.append(item)
        else:
            arrived, missing = self._arrived[self.node.inputs.index(stream)], self._missing
            for place, item in enumerate(items):
                assert 0 <= item < self.num_items, f"{self.node.name} has no item {item}"
                unit = item // size
                if arrived[item]:
                    continue
                arrived[item] = 1
                missing[unit] -= 1
                if lengths:
                    self._lengths[unit] = self._lengths.get(unit, 0.0) + lengths[place]
                if not missing[unit] and status[unit] == WAITING:
                    ready.append(unit)
        if ready:
            self._make_ready(ready)
        return bool(ready)

    def _make_ready(self, units: Sequence[int]) -> None:
        """Queue units where they are to be worked on."""
        status, size, place = self._status, self.unit_items, self._place
        num_ready = self._num_ready
        for unit in units:
            if self.sticky:
                lane = self._homes.of(unit)
            elif self.node.length is not None:
                lane = ANYWHERE
            else:
                lane = place(unit * size)
            window = self.window_of(unit)
            if window not in num_ready:
                self._ready[window], num_ready[window] = {}, 0
            status[unit] = READY
            num_ready[window] += 1
            queues = self._ready[window]
            queue = queues.get(lane)
            (self._queue(queues, lane) if queue is None else queue).push(unit)

    def window_of(self, unit: int) -> int:
        """The window of a unit, which is the next one with room where none was said yet."""
        if self._window_of is None:
            return unit // self._window_units
        return self._window_of.setdefault(unit, len(self._window_of) // self._window_units)

    def _queue(self, queues: dict[int, LowestFirst], lane: int) -> LowestFirst:
        if lane not in queues:
            longest = self.node.length is not None
            queues[lane] = LongestFirst(self._lengths) if longest else LowestFirst()
        return queues[lane]

    def ready(self, lane: int = ANYWHERE) -> int:
        """Units of the current window that wait for a call on this lane."""
        if not self.sticky:
            return self._num_ready.get(self.window, 0)
        self._send_home()
        queues = self._ready.get(self.window, {})
        return sum(len(queues.get(place, ())) for place in {ANYWHERE, lane})

    def _send_home(self) -> None:
        """Queue units again that other stages have bound to a lane since they became ready."""
        if len(self._homes) == self._homes_seen:
            return
        self._homes_seen = len(self._homes)
        self._queue_again(ANYWHERE)

    def _queue_again(self, lane: int) -> None:
        """Queue the units that wait for a lane where their homes say now."""
        for queues in self._ready.values():
            old = queues.pop(lane, None)
            for unit in old.drain() if old is not None else ():
                self._queue(queues, self._homes.of(unit)).push(unit)

    # --- leases -------------------------------------------------------------------------------

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
            units += queue.take(amount - len(units), end)
            if not queue:
                del queues[place]
            if len(units) == amount:
                break
        for unit in units:
            assert self._status[unit] == READY, f"{self.node.name}: {unit} was leased twice"
            self._status[unit] = LEASED
        if self.sticky:
            for unit in units:
                self._homes.bind(unit, lane)
            self._homes_seen = len(self._homes)
        if units:
            self._num_ready[self.window] -= len(units)
        self.leased += len(units)
        return sorted(units)

    def give_back(self, unit: int) -> None:
        """A leased unit was not worked on after all: it is ready again."""
        self._end_lease((unit,), WAITING)
        self._make_ready((unit,))

    def finish(self, units: Sequence[int]) -> None:
        """Leased units are done."""
        self._end_lease(units, DONE)
        self._window_done += len(units)
        status = self._status
        while self.low < self.num_units and status[self.low] == DONE:
            self.low += 1
        if self._lengths:
            for unit in units:
                self._lengths.pop(unit, None)

    def skip(self, units: Sequence[int]) -> None:
        """Units that wait for their first input need not be done: their outputs are there.

        Inputs that arrive for them are noted, should they be reopened.
        """
        for unit in units:
            assert self._status[unit] == WAITING, f"{self.node.name}: {unit} has begun"
            self._status[unit] = LEASED
        self.leased += len(units)
        self.finish(units)

    def _end_lease(self, units: Sequence[int], then: int) -> None:
        status = self._status
        for unit in units:
            assert status[unit] == LEASED, f"{self.node.name}: {unit} is not leased"
            status[unit] = then
        self.leased -= len(units)

    def note_doers(self, units: Sequence[int], replica: int) -> None:
        """A replica folds these units of an accumulating stage into its state."""
        for unit in units:
            self._doers[unit] = replica

    def folded_by(self, replica: int) -> list[int]:
        """Units of the current window that are done, and that a replica has folded in."""
        first = self.window * self._window_units
        units: Iterable[int] = range(first, min(first + self._window_units, len(self._doers)))
        if self._window_of is not None:
            units = sorted(unit for unit, at in self._window_of.items() if at == self.window)
        return [
            unit for unit in units if self._status[unit] == DONE and self._doers[unit] == replica
        ]

    @property
    def has_folded(self) -> bool:
        """Whether any unit was worked on, or is."""
        return self.leased > 0 or self.window > 0 or self._window_done > 0

    # --- when a lane is lost ------------------------------------------------------------------

    def depart(self, stream: int, items: Collection[int]) -> None:
        """Input items are gone: units that wait for a call, or for more items, wait for them."""
        gone = {item // self.unit_items for item in items}
        if self._arrived:
            arrived = self._arrived[self.node.inputs.index(stream)]
            for item in items:
                self._missing[item // self.unit_items] += arrived[item]
                arrived[item] = 0
        self._withdraw({unit for unit in gone if self._status[unit] == READY})

    def _withdraw(self, units: Collection[int]) -> None:
        """Take ready units out of the queues."""
        for unit in units:
            self._status[unit] = WAITING
            self._num_ready[self.window_of(unit)] -= 1
        for queues in self._ready.values() if units else ():
            for queue in queues.values():
                queue.remove(units)

    def reopen(self, unit: int) -> bool:
        """A unit that was done is to be done again, from the inputs that are there still.

        Returns:
            Whether the stage was complete.
        """
        assert self._status[unit] == DONE
        was_complete = self.complete
        if was_complete:
            self.window, self._window_done = self.window_of(unit), self._window_units
        self._window_done -= 1
        self._status[unit] = WAITING
        self.low = min(self.low, unit)
        if not self._arrived or not self._missing[unit]:
            self._make_ready((unit,))
        return was_complete

    def unbind(self, lane: int) -> None:
        """The states of items on a lane are gone, and `Homes` says so."""
        self._homes_seen = len(self._homes)
        self._queue_again(lane)

    # --- windows ------------------------------------------------------------------------------

    @property
    def nothing_more_comes(self) -> bool:
        """Whether every unit of the current window is ready, leased or done."""
        ready = self._num_ready.get(self.window, 0)
        return ready + self.leased + self._window_done == self._window_units

    @property
    def window_complete(self) -> bool:
        return not self.complete and self._window_done == self._window_units

    def next_window(self) -> None:
        """Go on to the next mini-batch."""
        assert self.window_complete
        self._ready.pop(self.window, None)
        self._num_ready.pop(self.window, None)
        self.window += 1
        self._window_done = 0

    @property
    def complete(self) -> bool:
        """Whether every window of the step is done."""
        return self.window == self.node.minibatches

    def status(self, unit: int) -> int:
        """WAITING, READY, LEASED or DONE."""
        return self._status[unit]

    def has_read(self, item: int) -> bool:
        """Whether the stage will not read an input item again."""
        return self._status[item // self.unit_items] == DONE

    @property
    def low_item(self) -> int:
        """Every input item below this one is done."""
        return self.low * self.unit_items

    @property
    def in_flight(self) -> int:
        """Items that have arrived and are not done, and units done out of turn."""
        status = self._status
        most = self.unit_items * len(self._arrived)
        partly = sum(map(most.__gt__, self._missing)) - sum(map((0).__eq__, self._missing))
        kept = len(status) - status.count(WAITING) - self.low
        return max(0, kept) + partly

    def items_of(self, units: Sequence[int]) -> Sequence[int]:
        """The items of some units, in the order of these."""
        size = self.unit_items
        if size == 1:
            return units
        return [item for unit in units for item in range(unit * size, (unit + 1) * size)]
