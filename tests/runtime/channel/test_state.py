"""The rules of a channel against a slow and obvious model of them, and one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.runtime.transport.channel.state import ChannelRequest, ChannelState, Outcome

MAX_ITEMS, MAX_BYTES = 3, 40
TICKETS = frozenset(range(8))


class Item(NamedTuple):
    body: object
    weight: float
    num_bytes: int


class Verdict(NamedTuple):
    """The end of a request."""

    ticket: int
    outcome: Outcome | None
    items: tuple[object, ...] = ()


class Tickets:
    """A state whose requests are known by numbers; each method tells which of them have ended."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.state = ChannelState(max_items, max_bytes)
        self._open: dict[int, ChannelRequest] = {}
        self._ended: list[Verdict] = []

    def put(self, ticket: int, key: str | None, put: Item, timeout: float, now: float) -> list:
        request = ChannelRequest(key, put.weight, [put.body], put.num_bytes)
        return self._begin(ticket, request, timeout, now)

    def get(self, ticket: int, key: str | None, timeout: float, now: float, **more: Any) -> list:
        more["enough_at"] = now + more.pop("linger", math.inf)
        return self._begin(ticket, ChannelRequest(key, **more), timeout, now)

    def _begin(self, ticket: int, request: ChannelRequest, timeout: float, now: float) -> list:
        self._open[ticket] = request
        request.wake = lambda: self._end(ticket, request)
        self.state.begin(request, now)
        return self.give_up(ticket, now) if timeout == 0 else self._told()

    def _end(self, ticket: int, request: ChannelRequest) -> None:
        items = tuple(one.body[0] for one in request.items)
        self._ended.append(Verdict(ticket, request.outcome, items))

    def _told(self) -> list[Verdict]:
        ended, self._ended = self._ended, []
        return ended

    def give_up(self, ticket: int, now: float) -> list[Verdict]:
        self.state.give_up(self._open[ticket], now)
        return self._told()

    def acknowledge(self, ticket: int, now: float) -> list[Verdict]:
        self.state.acknowledge(self._open[ticket], now)
        return self._told()

    def drop(self, ticket: int, now: float) -> list[Verdict]:
        self.state.drop(self._open[ticket], now)
        return self._told()

    def close(self, now: float) -> list[Verdict]:
        self.state.close(now)
        return self._told()

    def settle(self, now: float) -> list[Verdict]:
        self.state.settle(now)
        return self._told()


def item(body: object, weight: float = 1.0, num_bytes: int = 1) -> Item:
    return Item(body, weight, num_bytes)


def bodies(answer: Verdict) -> list[object]:
    return list(answer.items)


def outcomes(answers: Sequence[Verdict]) -> dict[int, Outcome]:
    return {answer.ticket: answer.outcome for answer in answers}


@dataclass
class Model:
    """One list of everything in order, and one list of everybody who waits; nothing is cached.

    A waiting putter's item is an entry of the list that is not stored yet.
    """

    entries: list[dict] = field(default_factory=list)
    getters: list[dict] = field(default_factory=list)
    handed: dict[int, list[dict]] = field(default_factory=dict)
    closed: bool = False

    def put(self, ticket: int, key: str, weight: float, size: int, body: int, wait: bool) -> dict:
        if self.closed:
            return {ticket: ("closed", [])}
        entry = {"putter": ticket, "key": key, "weight": weight, "size": size, "body": body}
        self.entries.append(entry)
        answers = self.settle()
        if not wait and entry["putter"] is not None and entry in self.entries:
            self.entries.remove(entry)
            answers[ticket] = ("full", [])
        return answers

    def get(self, ticket: int, key: str, weight: float, most: int, wait: bool) -> dict:
        getter = {"ticket": ticket, "key": key, "weight": weight, "most": most}
        self.getters.append(getter)
        answers = self.settle()
        if not wait and getter in self.getters:
            self.getters.remove(getter)
            answers |= {ticket: ("empty", [])} | self.settle()
        return answers

    def acknowledge(self, ticket: int) -> dict:
        self.handed.pop(ticket, None)
        return self.settle()

    def drop(self, ticket: int) -> dict:
        self.entries = [e for e in self.entries if e["putter"] != ticket]
        self.getters = [g for g in self.getters if g["ticket"] != ticket]
        self.entries = self.handed.pop(ticket, []) + self.entries
        return self.settle()

    def close(self) -> dict:
        self.closed = True
        answers = {e["putter"]: ("closed", []) for e in self.entries if e["putter"] is not None}
        self.entries = [e for e in self.entries if e["putter"] is None]
        return answers | self.settle()

    def settle(self) -> dict:
        answers: dict = {}
        while self._admit_one(answers) or self._serve_one(answers):
            pass
        return answers

    def stored(self) -> list[dict]:
        return [e for e in self.entries if e["putter"] is None]

    def _admit_one(self, answers: dict) -> bool:
        waiting = [e for e in self.entries if e["putter"] is not None]
        size = sum(e["size"] for e in self.stored())
        if not waiting or len(self.stored()) == MAX_ITEMS or size + waiting[0]["size"] > MAX_BYTES:
            return False
        if len(self.stored()) > MAX_ITEMS:
            return False
        answers[waiting[0]["putter"]] = ("done", [])
        waiting[0]["putter"] = None
        return True

    def _serve_one(self, answers: dict) -> bool:
        for getter in self.getters:
            first = next(g for g in self.getters if g["key"] == getter["key"])
            if getter is not first:
                continue
            there = [e for e in self.entries if e["key"] == getter["key"]]
            batch, complete = [], False
            for entry in there:
                too_heavy = sum(e["weight"] for e in batch) + entry["weight"] > getter["weight"]
                if batch and (too_heavy or complete):
                    complete = True
                    break
                batch.append(entry)
                heavy_enough = sum(e["weight"] for e in batch) >= getter["weight"]
                complete = heavy_enough or len(batch) == getter["most"]
            cannot_grow = self.closed or any(e["putter"] is not None for e in there)
            if batch and (complete or cannot_grow):
                for entry in batch:
                    self.entries.remove(entry)
                    if entry["putter"] is not None:
                        answers[entry["putter"]] = ("done", [])
                        entry["putter"] = None
                self.handed[getter["ticket"]] = batch
                answers[getter["ticket"]] = ("done", [e["body"] for e in batch])
            elif self.closed and not there and not self._may_come_back(getter["key"]):
                answers[getter["ticket"]] = ("closed", [])
            else:
                continue
            self.getters.remove(getter)
            return True
        return False

    def _may_come_back(self, key: str) -> bool:
        return any(e["key"] == key for batch in self.handed.values() for e in batch)


keys = st.sampled_from("aab")
weights = st.sampled_from([0, 1, 2, 5])
sizes = st.sampled_from([1, 2, 9, 15, 40])
puts = st.tuples(st.just("put"), keys, weights, sizes, st.sampled_from([True, True, False]))
steps = st.one_of(
    puts,
    puts,
    puts,
    st.tuples(st.just("get"), keys, st.sampled_from([1, 3, 6, math.inf]), st.integers(1, 4)),
    st.tuples(st.just("get"), keys, st.just(math.inf), st.just(1)),
    st.tuples(st.just("get_nowait"), keys, st.sampled_from([3, math.inf]), st.integers(1, 2)),
    st.tuples(st.just("acknowledge")),
    st.tuples(st.just("drop")),
)


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(0, 7), steps), max_size=60),
    st.one_of(st.none(), st.integers(0, 40)),
)
def test_the_state_follows_the_rules(
    script: list[tuple[int, tuple]], closes_after: int | None
) -> None:
    state, model = Tickets(MAX_ITEMS, MAX_BYTES), Model()
    busy: set[int] = set()
    taken, came_back = [], False
    for position, (choice, (what, *rest)) in enumerate(script):
        # One request at a time for each ticket: who can take this step?
        handed = set(model.handed)
        able = {"acknowledge": handed, "drop": handed | busy}.get(what, TICKETS - handed - busy)
        if not able:
            continue
        ticket, now = sorted(able)[choice % len(able)], float(position)
        if what == "acknowledge":
            taken += [entry["body"] for entry in model.handed[ticket]]
            answers, expected = state.acknowledge(ticket, now), model.acknowledge(ticket)
        elif what == "drop":
            came_back |= ticket in handed
            answers, expected = state.drop(ticket, now), model.drop(ticket)
            busy.discard(ticket)
        elif what == "put":
            key, weight, size, wait = rest
            timeout = math.inf if wait else 0.0
            answers = state.put(ticket, key, item(position, weight, size), timeout, now)
            expected = model.put(ticket, key, weight, size, position, wait)
            busy.add(ticket)
        else:
            key, weight, most = rest
            timeout = math.inf if what == "get" else 0.0
            answers = state.get(ticket, key, timeout, now, weight=weight, max_items=most)
            expected = model.get(ticket, key, weight, most, what == "get")
            busy.add(ticket)
        if position == closes_after:
            answers += state.close(now)
            expected |= model.close()
        told = {a.ticket: (a.outcome.name.lower(), bodies(a)) for a in answers}
        assert len(told) == len(answers)
        assert told == expected
        busy -= told.keys()
        stored = model.stored()
        assert state.state.num_items == len(stored)
        assert state.state.num_bytes == sum(entry["size"] for entry in stored)
        assert state.state.stats().keys == {
            key: n for key in "ab" if (n := sum(e["key"] == key for e in stored))
        }
        if not came_back:
            assert state.state.num_items <= MAX_ITEMS
            assert state.state.num_bytes <= MAX_BYTES
    assert len(taken) == len(set(taken))


@given(
    st.lists(st.tuples(keys, weights), min_size=1, max_size=40),
    st.sampled_from([1, 4, 7]),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_every_item_leaves_once_and_in_order(
    items: list[tuple[str, int]], target: float, dies: list[bool]
) -> None:
    """Getters die at random before they acknowledge; what is taken is what was put."""
    state, got = Tickets(100, 1000), {"a": [], "b": []}
    for number, (key, weight) in enumerate(items):
        state.put(1, key, item((key, weight, number), weight), 1.0, 0.0)
    state.close(0.0)
    deaths = iter(dies)
    for key in "ab":
        while True:
            (answer,) = state.get(2, key, 1.0, 0.0, weight=target, max_items=1000)
            if answer.outcome == Outcome.CLOSED:
                break
            weight = sum(part[1] for part in bodies(answer))
            assert weight <= target or len(answer.items) == 1
            if next(deaths, False):
                state.drop(2, 0.0)
                continue
            state.acknowledge(2, 0.0)
            got[key] += bodies(answer)
    for key in "ab":
        assert got[key] == [(k, w, n) for n, (k, w) in enumerate(items) if k == key]
    assert state.state.stats().taken == len(items)


# --- one by one -----------------------------------------------------------------------------------


def test_a_head_item_heavier_than_the_target_comes_alone() -> None:
    state = Tickets(10, 100)
    for weight in (8.0, 1.0, 1.0):
        state.put(1, None, item(weight, weight), 0.0, 0.0)
    (answer,) = state.get(2, None, 5.0, 0.0, weight=2.0, max_items=99)
    assert bodies(answer) == [8.0]


def test_weights_that_cannot_be_added_exactly_still_fill_a_batch() -> None:
    state = Tickets(100, 1000)
    for number in range(11):
        state.put(1, None, item(number, 0.1), 0.0, 0.0)
    (answer,) = state.get(2, None, 5.0, 0.0, weight=1.0, max_items=99)
    assert bodies(answer) == list(range(10))


def test_a_batch_larger_than_the_channel_does_not_wait_for_ever() -> None:
    state = Tickets(max_items=3, max_bytes=100)
    assert not state.get(9, None, 60.0, 0.0, weight=10.0, max_items=99)
    answers = [a for t in range(4) for a in state.put(t, None, item(t), 60.0, 1.0)]
    assert outcomes(answers) == dict.fromkeys((0, 1, 2, 3, 9), Outcome.DONE)
    assert bodies(answers[-1]) == [0, 1, 2, 3]


def test_a_key_that_fills_the_channel_does_not_block_another() -> None:
    state = Tickets(max_items=1, max_bytes=100)
    state.put(1, "a", item("first"), 60.0, 0.0)
    assert not state.put(2, "a", item("second"), 60.0, 0.0)
    assert not state.put(3, "b", item("other"), 60.0, 0.0)
    answers = state.get(4, "b", 60.0, 0.0)
    assert outcomes(answers) == {3: Outcome.DONE, 4: Outcome.DONE}
    assert state.state.num_items == 1


def test_small_items_do_not_starve_a_large_one() -> None:
    state = Tickets(max_items=10, max_bytes=10)
    state.put(1, None, item("small", num_bytes=6), 60.0, 0.0)
    assert not state.put(2, None, item("large", num_bytes=10), 60.0, 0.0)
    assert outcomes(state.put(3, None, item("late"), 0.0, 0.0)) == {3: Outcome.FULL}
    answers = state.get(4, None, 60.0, 0.0)
    assert outcomes(answers) == {2: Outcome.DONE, 4: Outcome.DONE}


def test_waiting_getters_are_served_in_their_order() -> None:
    state = Tickets(10, 100)
    for ticket in (1, 2, 3):
        assert not state.get(ticket, None, 60.0, 0.0)
    assert outcomes(state.drop(2, 0.0)) == {}
    served = [a.ticket for n in range(2) for a in state.put(9, None, item(n), 0.0, 0.0)]
    assert served == [9, 1, 9, 3]


def test_what_a_dead_getter_was_handed_goes_back_to_the_head() -> None:
    state = Tickets(10, 100)
    for number in range(4):
        state.put(1, None, item(number), 0.0, 0.0)
    state.get(2, None, 60.0, 0.0, max_items=2)
    state.drop(2, 0.0)
    (answer,) = state.get(3, None, 60.0, 0.0, max_items=4)
    assert bodies(answer) == [0, 1, 2, 3]


def test_a_closed_channel_is_not_over_while_an_item_may_come_back() -> None:
    state = Tickets(10, 100)
    state.put(1, None, item("last"), 0.0, 0.0)
    state.get(2, None, 60.0, 0.0)
    state.close(0.0)
    assert not state.get(3, None, 60.0, 0.0)
    assert bodies(state.drop(2, 0.0)[0]) == ["last"]
    assert not state.get(4, None, 60.0, 0.0)
    assert outcomes(state.acknowledge(3, 0.0)) == {4: Outcome.CLOSED}


def test_a_wait_that_is_over_ends_once() -> None:
    state = Tickets(max_items=1, max_bytes=100)
    assert not state.get(1, "empty", 5.0, 10.0)
    state.put(2, None, item(0), 1.0, 10.0)
    assert not state.put(3, None, item(1), 7.0, 10.0)
    assert state.give_up(1, 15.0) == [Verdict(1, Outcome.EMPTY)]
    assert not state.give_up(2, 15.0), "it has ended before"
    assert state.give_up(3, 17.5) == [Verdict(3, Outcome.FULL)]


def test_lingering_takes_what_is_there() -> None:
    state = Tickets(10, 100)
    assert not state.get(1, None, 60.0, 0.0, weight=9.0, max_items=99, linger=2.0)
    assert not state.settle(3.0)  # nothing there: any item will do from now on
    answers = state.put(2, None, item("one"), 0.0, 4.0)
    assert outcomes(answers) == {1: Outcome.DONE, 2: Outcome.DONE}


def test_closing_frees_putters_at_once_and_lets_getters_drain() -> None:
    state = Tickets(max_items=1, max_bytes=100)
    state.put(1, None, item("kept"), 0.0, 0.0)
    assert not state.put(2, None, item("refused"), 60.0, 0.0)
    assert not state.get(3, "other", 60.0, 0.0)
    assert outcomes(state.close(1.0)) == {2: Outcome.CLOSED, 3: Outcome.CLOSED}
    assert outcomes(state.put(4, None, item("late"), 60.0, 1.0)) == {4: Outcome.CLOSED}
    assert bodies(state.get(5, None, 60.0, 1.0)[0]) == ["kept"]


def test_items_that_come_back_are_weighed_anew() -> None:
    state = Tickets(10, 100)
    state.put(1, None, item("heavy", 5.0), 0.0, 0.0)
    state.get(2, None, 60.0, 0.0)
    state.put(1, None, item("light", 1.0), 0.0, 0.0)
    assert not state.get(3, None, 60.0, 0.0, weight=5.0, max_items=99)
    (answer,) = state.drop(2, 0.0)
    assert bodies(answer) == ["heavy"]


def test_a_putter_that_gives_up_lets_the_next_one_in() -> None:
    state = Tickets(max_items=10, max_bytes=10)
    state.put(1, None, item("there", num_bytes=6), 0.0, 0.0)
    assert not state.put(2, None, item("large", num_bytes=10), 5.0, 0.0)
    assert not state.put(3, None, item("small"), 60.0, 0.0)
    assert outcomes(state.give_up(2, 5.0)) == {2: Outcome.FULL, 3: Outcome.DONE}


def test_a_batch_that_gives_up_leaves_its_items_to_the_next_getter() -> None:
    state = Tickets(10, 100)
    state.put(1, None, item("one"), 0.0, 0.0)
    assert not state.get(2, None, 5.0, 0.0, weight=9.0, max_items=99)
    assert not state.get(3, None, 60.0, 0.0)
    answers = state.give_up(2, 5.0)
    assert outcomes(answers) == {2: Outcome.EMPTY, 3: Outcome.DONE}
    assert bodies(answers[-1]) == ["one"]


def test_a_key_that_was_used_once_leaves_nothing() -> None:
    """Keys such as item ids were never forgotten."""
    state = Tickets(10, 100)
    for number in range(1000):
        state.get(1, f"waits {number}", 0.0, 0.0)
        state.put(2, f"key {number}", item(number), 0.0, 0.0)
        assert bodies(state.get(3, f"key {number}", 0.0, 0.0)[0]) == [number]
        state.drop(3, 0.0)
        assert bodies(state.get(4, f"key {number}", 0.0, 0.0)[0]) == [number]
        state.acknowledge(4, 0.0)
    full = Tickets(1, 100)
    for number in range(3):
        full.put(number, f"key {number}", item(number), 0.0, 0.0)
    assert full.state._items.keys() == {"key 0"}
    assert not state.state._items
