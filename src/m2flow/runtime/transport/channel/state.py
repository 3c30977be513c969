"""What a channel holds and who waits for it: a state machine without clock, threads or sockets.

Requests carry a ticket (one request at a time for each ticket) and the time; every method returns
the answers that have become due. The rules:

* Items of a key leave in the order in which they came. Bounds count what is stored, over all keys.
* Who waits is served in order: getters within their key, putters over all keys. An item whose
  getter waits already is handed over even when the channel is full: no key blocks another.
* A getter owns what it was handed once it acknowledges; a ticket that is dropped before that puts
  its items back at the head.
* A closed channel takes nothing, and lets what it holds be taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

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
        most_items, most_bytes: the most that it has held.
        waiting_putters, waiting_getters: requests that wait.
        closed: whether it takes nothing more.
        keys: items by key; keys without any are absent.
    """

    items: int
    bytes: int
    put: int
    taken: int
    most_items: int
    most_bytes: int
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


class Item(NamedTuple):
    """An item as the channel sees it: opaque, with a weight and a size in bytes."""

    body: Any
    weight: float
    num_bytes: int


class Verdict(NamedTuple):
    """The end of a request, `waited` seconds after it came."""

    ticket: int
    outcome: Outcome
    waited: float
    items: tuple[Item, ...] = ()


class _Put(NamedTuple):
    ticket: int
    key: Key
    began: float
    deadline: float
    item: Item


class _Get(NamedTuple):
    ticket: int
    key: Key
    began: float
    deadline: float
    weight: float
    max_items: int
    enough_at: float  # from then on, whatever is there will do


class ChannelState:
    """The items of one channel, by key, and the requests that wait.

    Args:
        max_items: most items that are stored, over all keys.
        max_bytes: most bytes that are stored, over all keys.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.max_items, self.max_bytes = max_items, max_bytes
        self.num_items = self.num_bytes = self.num_put = self.num_taken = 0
        self.most_items = self.most_bytes = 0
        self.closed = False
        self.next_deadline = math.inf
        self._stored: dict[Key, deque[Item]] = {}
        self._putters: dict[int, _Put] = {}
        self._getters: dict[int, _Get] = {}
        self._handed: dict[int, tuple[Key, tuple[Item, ...]]] = {}

    def put(self, ticket: int, key: Key, item: Item, timeout: float, now: float) -> list[Verdict]:
        """Store the item, at once or when there is room; `timeout` 0 does not wait."""
        assert item.num_bytes <= self.max_bytes, "an item that can never be stored"
        if self.closed:
            return [Verdict(ticket, Outcome.CLOSED, 0.0)]
        self._putters[ticket] = _Put(ticket, key, now, now + timeout, item)
        return self.expire(now)

    def get(
        self,
        ticket: int,
        key: Key,
        timeout: float,
        now: float,
        *,
        weight: float = math.inf,
        max_items: int = 1,
        linger: float = math.inf,
    ) -> list[Verdict]:
        """Take items until they weigh `weight` or are `max_items`; the first in any case.

        A batch goes as it is, with at least one item, after `linger` seconds, when the channel is
        closed, or when it is too full to take another item of the key.
        """
        deadline, enough_at = now + timeout, now + linger
        self._getters[ticket] = _Get(ticket, key, now, deadline, weight, max_items, enough_at)
        return self.expire(now)

    def acknowledge(self, ticket: int, now: float) -> list[Verdict]:
        """The ticket's getter has what it was handed."""
        _, items = self._handed.pop(ticket, (None, ()))
        self.num_taken += len(items)
        return self.expire(now)

    def drop(self, ticket: int, now: float) -> list[Verdict]:
        """The ticket's owner is gone: forget what it waits for, put back what it was handed."""
        self._putters.pop(ticket, None)
        self._getters.pop(ticket, None)
        key, items = self._handed.pop(ticket, (None, ()))
        if items:
            self._stored.setdefault(key, deque()).extendleft(reversed(items))
            self._count(items, 1)
        return self.expire(now)

    def close(self, now: float) -> list[Verdict]:
        """Refuse putters from now on, the waiting ones too; getters drain what is stored."""
        self.closed = True
        refused = self._putters.values()
        answers = [Verdict(one.ticket, Outcome.CLOSED, now - one.began) for one in refused]
        self._putters.clear()
        return answers + self.expire(now)

    def expire(self, now: float) -> list[Verdict]:
        """Let in whom there is room for, serve who can be served, and end waits that are over."""
        answers = self._settled(now)
        if not self._putters and not self._getters:
            self.next_deadline = math.inf
            return answers
        while late := next((one for one in self._waits() if one.deadline <= now), None):
            is_put = self._putters.pop(late.ticket, None) is not None
            self._getters.pop(late.ticket, None)
            outcome = Outcome.FULL if is_put else Outcome.EMPTY
            answers += [Verdict(late.ticket, outcome, now - late.began), *self._settled(now)]
        ends = [one.deadline for one in self._waits()]
        ends += [one.enough_at for one in self._getters.values() if one.enough_at > now]
        self.next_deadline = min(ends, default=math.inf)
        return answers

    def _waits(self) -> list[_Put | _Get]:
        return [*self._putters.values(), *self._getters.values()]

    # --- questions --------------------------------------------------------------------------------

    def stats(self) -> ChannelStats:
        """What the channel holds, has seen, and who waits."""
        return ChannelStats(
            items=self.num_items,
            bytes=self.num_bytes,
            put=self.num_put,
            taken=self.num_taken,
            most_items=self.most_items,
            most_bytes=self.most_bytes,
            waiting_putters=len(self._putters),
            waiting_getters=len(self._getters),
            closed=self.closed,
            keys=self.sizes(),
        )

    def peek(self, key: Key) -> Item | None:
        """The item that would be taken next."""
        stored = self._stored.get(key)
        return stored[0] if stored else None

    def sizes(self) -> dict[Key, int]:
        """How many items each key holds; keys that hold none are absent."""
        return {key: len(stored) for key, stored in self._stored.items() if stored}

    # --- the rules --------------------------------------------------------------------------------

    def _settled(self, now: float) -> list[Verdict]:
        answers: list[Verdict] = []
        while self._admit_first(now, answers) or self._serve_first(now, answers):
            pass
        return answers

    def _admit_first(self, now: float, answers: list[Verdict]) -> bool:
        """Store the first putter's item if there is room."""
        putter = next(iter(self._putters.values()), None)
        if (
            putter is None
            or self.num_items >= self.max_items
            or self.num_bytes + putter.item.num_bytes > self.max_bytes
        ):
            return False
        self._stored.setdefault(putter.key, deque()).append(putter.item)
        self._count((putter.item,), 1)
        self._admit(putter, now, answers)
        return True

    def _admit(self, putter: _Put, now: float, answers: list[Verdict]) -> None:
        del self._putters[putter.ticket]
        self.num_put += 1
        answers.append(Verdict(putter.ticket, Outcome.DONE, now - putter.began))

    def _serve_first(self, now: float, answers: list[Verdict]) -> bool:
        """Serve the first getter that can be served; each key's getters in their order."""
        seen: set[Key] = set()
        for getter in self._getters.values():
            ticket, key = getter.ticket, getter.key
            if key in seen:
                continue
            seen.add(key)
            stored = self._stored.get(key, deque())
            waiting = [one for one in self._putters.values() if one.key == key]
            count = self._ready(getter, stored, waiting, now)
            over = self.closed and not stored and not self._given_out(key)
            if not count and not over:
                continue
            del self._getters[ticket]
            items = [stored.popleft() for _ in range(min(count, len(stored)))]
            self._count(items, -1)
            for putter in waiting[: count - len(items)]:
                items.append(putter.item)
                self._admit(putter, now, answers)
            if items:
                self._handed[ticket] = (key, tuple(items))
            outcome = Outcome.DONE if items else Outcome.CLOSED
            answers.append(Verdict(ticket, outcome, now - getter.began, tuple(items)))
            return True
        return False

    def _ready(
        self, getter: _Get, stored: Sequence[Item], waiting: Sequence[_Put], now: float
    ) -> int:
        """How many items the getter takes now; 0 while it has to wait.

        Putters that wait are behind the stored items: there is no room, so a batch cannot grow
        beyond them.
        """
        count, total, complete = 0, 0.0, False
        for item in chain(stored, (putter.item for putter in waiting)):
            if complete or (count and total + item.weight > getter.weight * (1 + ROUNDING)):
                return count
            count, total = count + 1, total + item.weight
            enough = getter.weight * (1 - ROUNDING)
            complete = total >= enough or count >= getter.max_items
        as_it_is = complete or waiting or self.closed or getter.enough_at <= now
        return count if as_it_is else 0

    def _given_out(self, key: Key) -> bool:
        """Whether items of the key may yet come back."""
        return any(handed_key == key for handed_key, _ in self._handed.values())

    def _count(self, items: Sequence[Item], sign: int) -> None:
        self.num_items += sign * len(items)
        self.num_bytes += sign * sum(item.num_bytes for item in items)
        self.most_items = max(self.most_items, self.num_items)
        self.most_bytes = max(self.most_bytes, self.num_bytes)
