"""A streaming call under a virtual clock: items that share a lane, and grow at the lane's pace.

All output items at work grow alike, by one unit in as many seconds as `pace` says for their number.
So one count of units that each has grown since the call began, and the count at which each will be
finished, say all: an event costs the logarithm of the items at work, however many units they need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from m2flow.flow.graph import StageNode

SAME = 1e-9
"""Items whose ends differ by no more than this share of the units grown end together."""


class VirtualStream:
    """One call in progress.

    Args:
        node, step, lane, call: what runs where.
        start: the moment at which it begins.
        pace: seconds of a unit, by how many items are at work.
        slots: the most output items at work at once; None for no limit. Further ones wait.

    Attributes:
        began: when it has begun.
        at: the moment up to which it has been played; in a pause it lies ahead.
        taken: input items that it has been given, in order.
        unsaid: items that are finished and not handed on.
        log_taken, log_pieces: what the driver remembers of its moments, for the span.
        ticket: changes when what happens next does, so that an event set down before is known to
            be void.
    """

    def __init__(
        self,
        node: StageNode,
        step: int,
        lane: int,
        call: int,
        start: float,
        pace: Callable[[int], float],
        slots: int | None = None,
    ) -> None:
        self.node, self.step, self.lane, self.call = node, step, lane, call
        self.began = self.at = start
        self.taken: list[int] = []
        self.unsaid: list[int] = []
        self.log_taken: list[list[object]] = []
        self.log_pieces: list[list[object]] = []
        self.ticket = 0
        self._pace, self._slots = pace, slots
        self._waiting: deque[tuple[int, float]] = deque()  # item; units that it needs
        self._grown = 0.0
        self._heap: list[tuple[float, int, int]] = []  # units grown at its end; order; item
        self._order = 0

    @property
    def running(self) -> int:
        """Items at work, and those that wait for a slot."""
        return len(self._heap) + len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing is at work, and nothing waits to be handed on."""
        return not self._heap and not self.unsaid

    def take(
        self,
        now: float,
        items: Sequence[int],
        outputs: Sequence[int],
        needs: Sequence[float],
        pause: float,
    ) -> None:
        """Take input items in; nothing grows meanwhile."""
        self.taken += items
        if now > self.at and self._heap and (pace := self._pace(len(self._heap))) > 0:
            self._grown += (now - self.at) / pace
        self.at = max(now, self.at) + pause
        self._waiting.extend(zip(outputs, needs, strict=True))
        self._fill_slots()
        self.ticket += 1

    def _fill_slots(self) -> None:
        """Set items to work that wait, as far as there are slots."""
        while self._waiting and (self._slots is None or len(self._heap) < self._slots):
            output, need = self._waiting.popleft()
            heappush(self._heap, (self._grown + need, self._order, output))
            self._order += 1

    def next_end(self) -> float:
        """When the next item is finished, or, where nothing is at work, the call is at its end."""
        if not self._heap:
            return self.at
        left = max(0.0, self._heap[0][0] - self._grown)
        return self.at + (left * self._pace(len(self._heap)) if left else 0.0)

    def finish_next(self, when: float) -> None:
        """The next item is finished, with all that end at the same moment."""
        end, _, item = heappop(self._heap)
        self._grown, self.at = max(self._grown, end), max(self.at, when)
        self.unsaid.append(item)
        while self._heap and self._heap[0][0] - end <= SAME * (1.0 + end):
            self.unsaid.append(heappop(self._heap)[2])
        self._fill_slots()
        self.ticket += 1

    def say(self) -> tuple[int, ...]:
        """Hand on what is finished."""
        said, self.unsaid = tuple(self.unsaid), []
        self.ticket += 1
        return said
