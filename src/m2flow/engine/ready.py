"""Queues of units that wait for a call: the lowest first, or the longest first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush


class LowestFirst:
    """Units in ascending order."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, unit: int) -> None:
        heappush(self._heap, unit)

    def take(self, amount: int, end: int) -> list[int]:
        """Take up to `amount` units below `end` out, in the order of the queue."""
        heap = self._heap
        units: list[int] = []
        while heap and len(units) < amount and heap[0] < end:
            units.append(heappop(heap))
        return units

    def drain(self) -> list[int]:
        """Take all of them out."""
        units, self._heap = self._heap, []
        return units

    def remove(self, units: Collection[int]) -> None:
        """Take these out, where they are in."""
        self._heap = [unit for unit in self._heap if unit not in units]
        heapify(self._heap)


class LongestFirst(LowestFirst):
    """Units below the end in descending order of length, those of the same length ascending.

    Args:
        lengths: by unit; shared with the ledger that learns them. One that is not there counts
            as 0.
    """

    __slots__ = ("_admitted", "_lengths")

    def __init__(self, lengths: Mapping[int, float]) -> None:
        super().__init__()
        self._lengths = lengths
        self._admitted: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap) + len(self._admitted)

    def take(self, amount: int, end: int) -> list[int]:
        heap, admitted = self._heap, self._admitted
        while heap and heap[0] < end:
            unit = heappop(heap)
            heappush(admitted, (-self._lengths.get(unit, 0.0), unit))
        units: list[int] = []
        while admitted and len(units) < amount:
            _, unit = heappop(admitted)
            if unit < end:
                units.append(unit)
            else:  # the end has come nearer meanwhile
                heappush(heap, unit)
        return units

    def drain(self) -> list[int]:
        units = super().drain() + [unit for _, unit in self._admitted]
        self._admitted.clear()
        return units

    def remove(self, units: Collection[int]) -> None:
        super().remove(units)
        self._admitted = [entry for entry in self._admitted if entry[1] not in units]
        heapify(self._admitted)
