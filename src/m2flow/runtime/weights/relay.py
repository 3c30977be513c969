"""`Relay`: a payload that several lanes of a node want from another node crosses the network once.

The first of them that asks has it brought, the others wait for that; it is kept until a later
version comes. It is asked from the threads of the payload server too, so that nobody waits for the
lane. What could not be brought is forgotten: the next request has it brought again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from m2flow.runtime.weights.exports import WeightsKey


@dataclass(frozen=True, slots=True)
class RelayKey:
    """Asks a lane for what another lane has.

    Attributes:
        lane: who has it.
        key: what it is.
        seconds: longest that bringing it may take.
    """

    lane: int
    key: WeightsKey
    seconds: float = field(compare=False)


@dataclass(slots=True)
class _Brought:
    """What was brought, once it was, and who is about to bring it."""

    value: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Relay:
    """Brings weights from other nodes for all lanes of this one.

    Args:
        ask: brings what a lane has: its number, a key, seconds.
    """

    def __init__(self, ask: Callable[[int, Any, float], Any]) -> None:
        self._ask = ask
        self._brought: dict[RelayKey, _Brought] = {}
        self._lock = threading.Lock()

    def bring(self, key: RelayKey) -> Any:
        """Return the payload of the key; raises the error that fetching it has raised."""
        with self._lock:
            if key not in self._brought:
                for one in [one for one in self._brought if _precedes(one, key)]:
                    del self._brought[one]
            brought = self._brought.setdefault(key, _Brought())
        with brought.lock:
            if brought.value is None:
                brought.value = self._ask(key.lane, key.key, key.seconds)
            return brought.value

    def drop(self) -> None:
        """Forget what was brought in an earlier run."""
        with self._lock:
            self._brought = {}


def _precedes(one: RelayKey, other: RelayKey) -> bool:
    same = (one.lane, one.key.source) == (other.lane, other.key.source)
    return same and one.key.version < other.key.version
