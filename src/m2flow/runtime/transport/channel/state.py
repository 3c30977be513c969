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
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

ROUNDING = 1e-9
"""Relative slack when weights are added up: ten items of 0.1 weigh 1."""


class Outcome(IntEnum):
    """What became of a request."""

    DONE = 0
    FULL = 1
    EMPTY = 2
    CLOSED = 3


@dataclass(frozen=True, slots=True)
class Item:
    """An item as the channel sees it: opaque, with a weight and a size in bytes."""

    body: Any
    weight: float
    num_bytes: int


class Answer(NamedTuple):
    """The end of a request, `waited` seconds after it came."""

    ticket: int
    outcome: Outcome
    waited: float
    items: tuple[Item, ...] = ()


@dataclass(slots=True)
class _Put:
    ticket: int
    key: Hashable
    item: Item
    began: float
    deadline: float


@dataclass(slots=True)
class _Get:
    ticket: int
    key: Hashable
    weight: float
    max_items: int
    began: float
    deadline: float
    enough_at: float  # from then on, whatever is there will do
    counted: int = 0  # of the stored items, how many are known to belong to the batch
    total: float = 0.0


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
        self._stored: dict[Hashable, deque[Item]] = {}
        self._putters: dict[int, _Put] = {}
        self._getters: dict[int, _Get] = {}
        self._getters_of: dict[Hashable, deque[_Get]] = {}
        self._handed: dict[int, tuple[Hashable, tuple[Item, ...]]] = {}
        self._earliest = math.inf  # no deadline is earlier

    # --- requests ---------------------------------------------------------------------------------

    def put(
        self, ticket: int, key: Hashable, item: Item, timeout: float, now: float
    ) -> list[Answer]:
        """Store the item, at once or when there is room; `timeout` 0 does not wait."""
        assert item.num_bytes <= self.max_bytes, "an item that can never be stored"
        if self.closed:
            return [Answer(ticket, Outcome.CLOSED, 0.0)]
        self._putters[ticket] = _Put(ticket, key, item, now, now + timeout)
        answers = self._settle([key], now)
        if ticket in self._putters:
            self._earliest = min(self._earliest, now + timeout)
            answers += self.expire(now)
        return answers

    def get(
        self,
        ticket: int,
        key: Hashable,
        timeout: float,
        now: float,
        *,
        weight: float = math.inf,
        max_items: int = 1,
        linger: float = math.inf,
    ) -> list[Answer]:
        """Take items until they weigh `weight` or are `max_items`; the first in any case.

        A batch goes as it is, with at least one item, after `linger` seconds, when the channel is
        closed, or when it is too full to take another item of the key.
        """
        getter = _Get(ticket, key, weight, max_items, now, now + timeout, now + linger)
        self._getters[ticket] = getter
        self._getters_of.setdefault(key, deque()).append(getter)
        answers = self._settle([key], now)
        if ticket in self._getters:
            self._earliest = min(self._earliest, getter.deadline, getter.enough_at)
            answers += self.expire(now)
        return answers

    def acknowledge(self, ticket: int, now: float) -> list[Answer]:
        """The ticket's getter has what it was handed."""
        handed = self._handed.pop(ticket, None)
        if handed is None:
            return []
        self.num_taken += len(handed[1])
        return self._settle([handed[0]], now) if self.closed else []

    def drop(self, ticket: int, now: float) -> list[Answer]:
        """The ticket's owner is gone: forget what it waits for, put back what it was handed."""
        keys: list[Hashable] = []
        putter = self._putters.pop(ticket, None)
        if putter is not None:
            keys.append(putter.key)
        if ticket in self._getters:
            keys.append(self._forget(self._getters[ticket]).key)
        if ticket in self._handed:
            key, items = self._handed.pop(ticket)
            keys.append(key)
            self._stored.setdefault(key, deque()).extendleft(reversed(items))
            self._count(items, 1)
            for getter in self._getters_of.get(key, ()):
                getter.counted, getter.total = 0, 0.0
        return self._settle(keys, now)

    def close(self, now: float) -> list[Answer]:
        """Refuse putters from now on, the waiting ones too; getters drain what is stored."""
        self.closed = True
        answers = [Answer(p.ticket, Outcome.CLOSED, now - p.began) for p in self._putters.values()]
        self._putters.clear()
        return answers + self._settle(list(self._getters_of), now)

    def expire(self, now: float) -> list[Answer]:
        """Answer those whose deadline has come."""
        if now < self._earliest:
            return []
        answers = []
        keys: list[Hashable] = []
        for putter in [p for p in self._putters.values() if p.deadline <= now]:
            del self._putters[putter.ticket]
            keys.append(putter.key)
            answers.append(Answer(putter.ticket, Outcome.FULL, now - putter.began))
        keys += [g.key for g in self._getters.values() if g.enough_at <= now]
        answers += self._settle(keys, now)
        late = [g for g in self._getters.values() if g.deadline <= now]
        for getter in late:
            self._forget(getter)
            answers.append(Answer(getter.ticket, Outcome.EMPTY, now - getter.began))
        answers += self._settle([getter.key for getter in late], now)
        times = [p.deadline for p in self._putters.values()]
        times += [g.deadline for g in self._getters.values()]
        times += [g.enough_at for g in self._getters.values() if g.enough_at > now]
        self._earliest = min(times, default=math.inf)
        return answers

    # --- questions --------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """Nothing is due before this time; infinite where nobody waits."""
        return self._earliest

    @property
    def waiting(self) -> tuple[int, int]:
        """How many putters and how many getters wait."""
        return len(self._putters), len(self._getters)

    def peek(self, key: Hashable) -> Item | None:
        """The item that would be taken next."""
        stored = self._stored.get(key)
        return stored[0] if stored else None

    def sizes(self) -> dict[Hashable, int]:
        """How many items each key holds; keys that hold none are absent."""
        return {key: len(stored) for key, stored in self._stored.items() if stored}

    # --- the rules --------------------------------------------------------------------------------

    def _settle(self, keys: Iterable[Hashable], now: float) -> list[Answer]:
        """Let in whom there is room for and serve who can be served, until nothing moves."""
        answers: list[Answer] = []
        touched = dict.fromkeys(keys)
        while True:
            for putter in self._admissible():
                self._stored.setdefault(putter.key, deque()).append(putter.item)
                self._count((putter.item,), 1)
                self._admit(putter, now, answers)
                touched[putter.key] = None
            served = [self._serve(key, now, answers) for key in touched]
            if not any(served) or not self._putters:
                return answers

    def _admissible(self) -> Iterator[_Put]:
        """Putters in their order, as long as there is room for the next."""
        while self._putters:
            putter = next(iter(self._putters.values()))
            num_bytes = self.num_bytes + putter.item.num_bytes
            if self.num_items >= self.max_items or num_bytes > self.max_bytes:
                return
            yield putter

    def _admit(self, putter: _Put, now: float, answers: list[Answer]) -> None:
        del self._putters[putter.ticket]
        self.num_put += 1
        answers.append(Answer(putter.ticket, Outcome.DONE, now - putter.began))

    def _serve(self, key: Hashable, now: float, answers: list[Answer]) -> bool:
        """Serve the getters of a key in their order; whether any got items."""
        served = False
        while getters := self._getters_of.get(key):
            getter = getters[0]
            stored = self._stored.get(key, deque())
            waiting = [p for p in self._putters.values() if p.key == key]
            count = self._ready(getter, stored, waiting, now)
            if count:
                items = [stored.popleft() for _ in range(min(count, len(stored)))]
                self._count(items, -1)
                for putter in waiting[: count - len(items)]:
                    items.append(putter.item)
                    self._admit(putter, now, answers)
                if not stored:
                    self._stored.pop(key, None)
                self._handed[getter.ticket] = (key, tuple(items))
                outcome, served = Outcome.DONE, True
            elif self.closed and not stored and not self._given_out(key):
                items, outcome = [], Outcome.CLOSED
            else:
                break
            self._forget(getter)
            answers.append(Answer(getter.ticket, outcome, now - getter.began, tuple(items)))
        return served

    def _ready(self, getter: _Get, stored: deque[Item], waiting: list[_Put], now: float) -> int:
        """How many items the getter takes now; 0 while it has to wait.

        Putters that wait are behind the stored items: there is no room, so a batch cannot grow
        beyond them.
        """
        while getter.counted < len(stored):
            verdict = _extend(getter, stored[getter.counted])
            if verdict:
                return getter.counted
        count, total = getter.counted, getter.total
        for putter in waiting:
            if _extend(getter, putter.item):
                break
        taken = getter.counted
        getter.counted, getter.total = count, total
        as_it_is = waiting or self.closed or getter.enough_at <= now
        return taken if as_it_is else 0

    def _given_out(self, key: Hashable) -> bool:
        """Whether items of the key may yet come back."""
        return any(handed_key == key for handed_key, _ in self._handed.values())

    def _forget(self, getter: _Get) -> _Get:
        del self._getters[getter.ticket]
        others = self._getters_of[getter.key]
        others.remove(getter)
        if not others:
            del self._getters_of[getter.key]
        return getter

    def _count(self, items: Iterable[Item], sign: int) -> None:
        for item in items:
            self.num_items += sign
            self.num_bytes += sign * item.num_bytes
        self.most_items = max(self.most_items, self.num_items)
        self.most_bytes = max(self.most_bytes, self.num_bytes)


def _extend(getter: _Get, item: Item) -> bool:
    """Add an item to the getter's batch if it belongs there; whether the batch is complete."""
    total = getter.total + item.weight
    if getter.counted and total > getter.weight * (1 + ROUNDING):
        return True
    getter.counted += 1
    getter.total = total
    return total >= getter.weight * (1 - ROUNDING) or getter.counted >= getter.max_items
