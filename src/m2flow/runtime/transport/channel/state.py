"""What a channel holds and who waits for it: a state machine without clock, threads or sockets.

A request that ends gets its outcome, whichever process ended it. The rules:

* Items of a key leave in the order in which they came. Bounds count what is stored, over all keys.
* Who waits is served in order: getters within their key, putters over all keys. An item whose
  getter waits already is handed over even when the channel is full: no key blocks another.
* A getter owns what it was handed once it acknowledges; dropped before that, it gives its items
  back to the head.
* A closed channel takes nothing, and lets what it holds be taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Key = str | int | None
"""What items may be filed under."""

ROUNDING = 1e-9
"""Relative slack when weights are added up: ten items of 0.1 weigh 1."""


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """A channel at one moment.

    Attributes:
        items, bytes: what it holds.
        put, taken: items that have come, and that have been taken for good.
        waiting_putters, waiting_getters: requests that wait.
        closed: whether it takes nothing more.
        keys: items by key; keys without any are absent.
    """

    items: int
    bytes: int
    put: int
    taken: int
    waiting_putters: int
    waiting_getters: int
    closed: bool
    keys: dict[Key, int]


class Outcome(Enum):
    """What became of a request."""

    DONE = "done"
    FULL = "full"
    EMPTY = "empty"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class ChannelRequest:
    """A put or a get, which may have to wait; a put that is done is the item in the channel.

    Attributes:
        key: of its items.
        weight: of what is put; the most that a batch may weigh, but for its first item.
        body, num_bytes: what is put, and its size; None for a get.
        max_items: the most that a get takes.
        enough_at: when a get takes whatever is there.
        items: what a get was handed.
        wake: called when it has ended.
        outcome: what became of it; None while it waits.
    """

    key: Key = None
    weight: float = math.inf
    body: Any = None
    num_bytes: int = 0
    max_items: float = 1
    enough_at: float = math.inf
    items: Sequence[ChannelRequest] = ()
    wake: Callable[[], object] = bool
    outcome: Outcome | None = None

    def end(self, outcome: Outcome) -> None:
        """Note the outcome, and wake the thread or process that waits for it."""
        self.outcome = outcome
        self.wake()


class ChannelState:
    """The items of one channel, by key, and the requests that wait.

    Args:
        max_items: most items that are stored, over all keys.
        max_bytes: most bytes that are stored, over all keys.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.max_items, self.max_bytes = max_items, max_bytes
        self.num_items = self.num_bytes = self._num_put = self._num_taken = 0
        self.closed = False
        # By key what is stored, oldest first, and behind it what waits to be; no key without any.
        self._items: dict[Key, deque[ChannelRequest]] = {}
        self._putters: dict[ChannelRequest, None] = {}
        self._getters: dict[ChannelRequest, None] = {}
        self._handed: set[ChannelRequest] = set()

    def begin(self, request: ChannelRequest, now: float) -> None:
        """Queue a request, and serve it at once if that is possible."""
        if request.body is None:
            self._getters[request] = None
        elif self.closed:
            request.end(Outcome.CLOSED)
        else:
            self._putters[request] = None
            self._items.setdefault(request.key, deque()).append(request)
        self.settle(now)

    def give_up(self, request: ChannelRequest, now: float) -> None:
        """End a request whose deadline has passed, if it still waits."""
        if request.outcome is None:
            request.end(Outcome.EMPTY if request.body is None else Outcome.FULL)
            self.drop(request, now)

    def acknowledge(self, request: ChannelRequest, now: float) -> None:
        """Note that a getter has received its items."""
        self._handed.discard(request)
        self._num_taken += len(request.items)
        self.settle(now)

    def drop(self, request: ChannelRequest, now: float) -> None:
        """Forget a request whose client has gone; items that it was handed go back to the head."""
        if request in self._putters:
            self._forget(request)
        self._getters.pop(request, None)
        if request in self._handed:
            self._handed.remove(request)
            there = self._items.setdefault(request.key, deque())
            there.extendleft(reversed(request.items))
            self._count(request.items, 1)
        self.settle(now)

    def close(self, now: float) -> None:
        """Refuse putters from now on, the waiting ones too; getters drain what is stored."""
        self.closed = True
        for putter in list(self._putters):
            self._forget(putter)
            putter.end(Outcome.CLOSED)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Store items of waiting putters while there is room, and serve waiting getters."""
        while self._admit_first() or self._serve_first(now):
            pass

    def stats(self) -> ChannelStats:
        """What the channel holds, has seen, and who waits."""
        return ChannelStats(
            items=self.num_items,
            bytes=self.num_bytes,
            put=self._num_put,
            taken=self._num_taken,
            waiting_putters=len(self._putters),
            waiting_getters=len(self._getters),
            closed=self.closed,
            keys=self._sizes(),
        )

    def _sizes(self) -> dict[Key, int]:
        sizes = {key: len(items) for key, items in self._items.items()}
        for putter in self._putters:
            sizes[putter.key] -= 1
        return {key: size for key, size in sizes.items() if size}

    # --- the rules --------------------------------------------------------------------------------

    def _admit_first(self) -> bool:
        """Store the first putter's item if there is room."""
        putter = next(iter(self._putters), None)
        if (
            putter is None
            or self.num_items >= self.max_items
            or self.num_bytes + putter.num_bytes > self.max_bytes
        ):
            return False
        self._count((putter,), 1)
        self._admit(putter)
        return True

    def _admit(self, putter: ChannelRequest) -> None:
        del self._putters[putter]
        self._num_put += 1
        putter.end(Outcome.DONE)

    def _forget(self, putter: ChannelRequest) -> None:
        del self._putters[putter]
        self._items[putter.key].remove(putter)
        self._drop_if_empty(putter.key)

    def _drop_if_empty(self, key: Key) -> None:
        if not self._items.get(key, True):
            del self._items[key]

    def _serve_first(self, now: float) -> bool:
        """Serve the first getter that can be served; each key's getters in their order."""
        seen: set[Key] = set()
        for getter in self._getters:
            if getter.key in seen:
                continue
            seen.add(getter.key)
            there = self._items.get(getter.key, deque())
            count = self._ready(getter, there, now)
            may_come_back = any(one.key == getter.key for one in self._handed)
            if not count and (not self.closed or there or may_come_back):
                continue
            getter.items = [there.popleft() for _ in range(count)]
            self._drop_if_empty(getter.key)
            self._count([one for one in getter.items if one not in self._putters], -1)
            for one in getter.items:
                if one in self._putters:
                    self._admit(one)
            del self._getters[getter]
            if count:
                self._handed.add(getter)
            getter.end(Outcome.DONE if count else Outcome.CLOSED)
            return True
        return False

    def _ready(self, getter: ChannelRequest, there: Sequence[ChannelRequest], now: float) -> int:
        """How many items the getter takes now; 0 while it has to wait.

        Where putters wait there is no room, so that a batch cannot grow beyond their items.
        """
        count, total, complete = 0, 0.0, False
        for item in there:
            if complete or (count and total + item.weight > getter.weight * (1 + ROUNDING)):
                return count
            count, total = count + 1, total + item.weight
            enough = getter.weight * (1 - ROUNDING)
            complete = total >= enough or count >= getter.max_items
        cannot_grow = (
            self.closed or getter.enough_at <= now or (there and there[-1].outcome is None)
        )
        return count if complete or cannot_grow else 0

    def _count(self, items: Sequence[ChannelRequest], sign: int) -> None:
        self.num_items += sign * len(items)
        self.num_bytes += sign * sum(item.num_bytes for item in items)
