"""The `object` link: payloads by way of Ray's object store, between any two machines.

The lane that has the payload keeps it under a number; the one that asks calls its actor with
the number, and Ray brings the answer. Two trips instead of one, and pickling on the way: it is for
machines between which nothing else is faster, and for comparison.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

KEPT = 64
"""Payloads kept for askers that have not come; the oldest is forgotten then."""


class RayObjects:
    """Both ends of the link, for one lane.

    Args:
        lane: the lane's number.

    Attributes:
        actors: handles of all lanes' actors by number, to be filled in when they are known.
    """

    def __init__(self, lane: int | None) -> None:
        self.lane = lane
        self.actors: Mapping[int, Any] = {}
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def put(self, value: Any) -> tuple[int | None, int]:
        """Keep a payload for whoever has the token that is returned."""
        with self._lock:
            number = next(self._numbers)
            self._kept[number] = value
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self.lane, number

    def get(self, token: tuple[int, int], timeout: float) -> Any:
        """Bring the payload of a token here."""
        import ray

        lane, number = token
        return ray.get(self.actors[lane].hand_over.remote(number), timeout=timeout)

    def hand_over(self, number: int) -> Any:
        """The payload of a number, once."""
        with self._lock:
            return self._kept.pop(number)
