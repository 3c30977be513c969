"""`Homes`: which lane holds the state of an item that a sticky stage has worked on."""

from __future__ import annotations

from collections.abc import Sequence

ANYWHERE = -1
"""Stands for a lane where a unit may be leased to any lane alike."""


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
