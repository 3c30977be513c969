"""The `object` link: payloads by way of Ray's object store, between any two machines.

The lane that has the payload keeps it under a number; the one that asks calls its actor with the
number, and Ray brings the answer. It takes two trips and pickles on the way: it is what the other
links are measured against (`benchmarks/mechanisms.py`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any


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
        self._kept: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def put(self, value: Any) -> tuple[int | None, int]:
        """Keep a payload until it is handed over or withdrawn. Returns its token."""
        with self._lock:
            number = next(self._numbers)
            self._kept[number] = value
        return self.lane, number

    def withdraw(self, token: tuple[int | None, int]) -> None:
        """Let go of a payload that its asker has got, or will never ask for."""
        with self._lock:
            self._kept.pop(token[1], None)

    def get(self, token: tuple[int, int], timeout: float) -> Any:
        """Bring the payload of a token here."""
        import ray

        lane, number = token
        return ray.get(self.actors[lane].hand_over.remote(number), timeout=timeout)

    def hand_over(self, number: int) -> Any:
        """The payload of a number, once."""
        with self._lock:
            return self._kept.pop(number)
