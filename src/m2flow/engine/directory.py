"""Where things are: `Directory` for the payloads of a step, `Homes` for states of sticky items.

An output item is made by one lane, which holds it from then on. A lane that has read it for a call
holds a copy. When no stage will read the item any more, it is released everywhere. Source items are
with the launcher at all times, whatever is released.

This is the only record of where payloads are: commands name the lane to read from, and drivers
keep no record of their own. Memory is four bytes for each output item of the step, and an entry for
each item of which a copy is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from m2flow.engine.messages import LAUNCHER, Part
from m2flow.flow.graph import SOURCE, FlowGraph

NOT_MADE = -2
"""In place of a lane: the item has not been made, or is to be made again."""

RELEASED = -3
"""In place of a lane: the item was made, and no lane holds it any more."""

ANYWHERE = -1
"""Stands for a lane where a unit may be leased to any lane alike."""


class Directory:
    """The payloads of one step.

    Args:
        graph: the flow.
        num_items: source items of the step.
    """

    __slots__ = ("_again", "_copies", "_homes")

    def __init__(self, graph: FlowGraph, num_items: int) -> None:
        self._homes = [
            array("i", [NOT_MADE]) * (num_items * node.fanout * node.expands)
            for node in graph.nodes
        ]
        self._homes.append(array("i", [LAUNCHER]) * num_items)  # at index SOURCE
        self._again: set[tuple[int, int]] = set()
        self._copies: list[dict[int, tuple[int, ...]]] = [{} for _ in self._homes]
        assert SOURCE == -1

    def size(self, producer: int) -> int:
        """How many items the stage makes in the step."""
        return len(self._homes[producer])

    def home(self, producer: int, item: int) -> int:
        """The lane that made the item, LAUNCHER, NOT_MADE or RELEASED."""
        return self._homes[producer][item]

    def homes(self, producer: int) -> Callable[[int], int]:
        """What tells the home of an item of one stage."""
        return self._homes[producer].__getitem__

    def holds(self, producer: int, item: int) -> bool:
        """Whether any lane, or the launcher, has the item."""
        return self._homes[producer][item] >= LAUNCHER

    def is_at(self, producer: int, item: int, lane: int) -> bool:
        """Whether a lane holds the item."""
        home = self._homes[producer][item]
        return home == lane or lane in self._copies[producer].get(item, ())

    def add(self, producer: int, items: Iterable[int], lane: int) -> list[int]:
        """A lane has made items. Those that had not been made before; the others change nothing."""
        homes, new = self._homes[producer], []
        for item in items:
            if homes[item] == NOT_MADE:
                homes[item] = lane
                new.append(item)
        return new

    def put(self, producer: int, items: Iterable[int], lane: int) -> None:
        """A lane has made items of a loop, in place of those of the turn before."""
        homes = self._homes[producer]
        for item in items:
            homes[item] = lane

    def copied(self, producer: int, items: Iterable[int], lanes: Sequence[int]) -> None:
        """Lanes have read items, and hold copies of those that they have not made."""
        homes, copies = self._homes[producer], self._copies[producer]
        for item in items:
            if self._again and (producer, item) in self._again:
                continue
            new = [x for x in lanes if x != homes[item] and x not in copies.get(item, ())]
            if new:
                copies[item] = (*copies.get(item, ()), *new)

    def parts(self, producer: int, items: Sequence[int], reader: int) -> list[Part]:
        """From which lanes a lane is to read items: from itself where it has them."""
        homes, copies = self._homes[producer], self._copies[producer]
        lanes = [homes[item] for item in items]
        assert not lanes or min(lanes) >= LAUNCHER, f"items of stage {producer} are not there"
        if copies:
            for place, item in enumerate(items):
                if reader in copies.get(item, ()):
                    lanes[place] = reader
        if lanes and lanes.count(lanes[0]) == len(lanes):
            return [Part(producer, tuple(items), lanes[0])]
        by_lane: dict[int, list[int]] = {}
        for lane, item in zip(lanes, items, strict=True):
            by_lane.setdefault(lane, []).append(item)
        return [Part(producer, tuple(some), lane) for lane, some in by_lane.items()]

    def release(
        self, producer: int, items: Sequence[int], also: Sequence[int] = ()
    ) -> dict[tuple[int, ...], list[int]]:
        """Nobody will read items any more.

        Args:
            also: lanes that have just read them.

        Returns:
            The lanes that hold them, and which of them each group of lanes holds.
        """
        homes, copies = self._homes[producer], self._copies[producer]
        if len(items) == 1 and not copies:  # nearly always, where items are finished one by one
            home = homes[items[0]]
            if producer != SOURCE:
                homes[items[0]] = RELEASED
            lanes = (*also,) if home in also or home < 0 else (home, *also)
            return {lanes: list(items)} if lanes else {}
        found = [homes[item] for item in items]
        if producer != SOURCE:
            for item in items:
                homes[item] = RELEASED
        by_holders: dict[tuple[int, ...], list[int]] = {}  # the home, then the copies
        if not copies and found.count(found[0]) == len(found):
            by_holders[found[0],] = list(items)
        else:
            for home, item in zip(found, items, strict=True):
                by_holders.setdefault((home, *copies.pop(item, ())), []).append(item)
        by_lanes: dict[tuple[int, ...], list[int]] = {}
        for holders, some in by_holders.items():
            lanes = tuple(dict.fromkeys([lane for lane in (*holders, *also) if lane >= 0]))
            if lanes:
                by_lanes.setdefault(lanes, []).extend(some)
        return by_lanes

    def lose(self, lane: int) -> None:
        """A lane is gone. What no other lane holds is RELEASED."""
        for producer in range(SOURCE, len(self._homes) - 1):
            homes, copies = self._homes[producer], self._copies[producer]
            for item, lanes in list(copies.items()):
                if lane in lanes:
                    copies[item] = tuple(other for other in lanes if other != lane)
                    if not copies[item]:
                        del copies[item]
            for item, home in enumerate(homes):
                if home == lane:
                    left = copies.pop(item, ())
                    homes[item] = left[0] if left else RELEASED
                    if left[1:]:
                        copies[item] = left[1:]

    @property
    def makes_again(self) -> bool:
        """Whether items were to be made again at any time of the step."""
        return bool(self._again)

    def forget(self, producer: int, item: int) -> None:
        """An item that no lane holds is to be made again.

        From then on no copies of it are entered: who has read it may have read what was lost.
        """
        self._again.add((producer, item))
        if not self.holds(producer, item):
            self._homes[producer][item] = NOT_MADE


class Homes:
    """The homes of one worker's items in a step, as one of its sticky stages sees them.

    An item whose home is not known yet belongs where the item that it was made of belongs. Stages
    count their items in spaces of their own, which are told apart by fanout.

    Args:
        lanes: (fanout, item) to lane; shared by the sticky stages of the worker.
        fanouts: this stage's own, and those of the worker's sticky stages upstream.
    """

    __slots__ = ("_fanouts", "_lanes")

    def __init__(self, lanes: dict[tuple[int, int], int], fanouts: Sequence[int]) -> None:
        self._lanes, self._fanouts = lanes, fanouts

    def __len__(self) -> int:
        return len(self._lanes)

    def of(self, item: int) -> int:
        """The lane the item belongs to, or ANYWHERE."""
        own = self._fanouts[0]
        for fanout in self._fanouts:
            lane = self._lanes.get((fanout, item * fanout // own))
            if lane is not None:
                return lane
        return ANYWHERE

    def bind(self, item: int, lane: int) -> None:
        """The lane is about to hold the item's state."""
        self._lanes[self._fanouts[0], item] = lane
