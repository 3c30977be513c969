"""What a lane demands of a streaming stage that is to give items back, and to go on with others."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.engine.streams import Piece, StageStream
from m2flow.errors import FlowError, UserError
from m2flow.flow import GIVE_BACK, Arrived, Batch, Flow, Ragged, Stream, Unfinished, Worker, stage

Stage = Callable[..., Generator[Any, Any, None]]


class Counts(Worker):
    @stage(streaming=True, expands=2, resumable=True)
    def grow(self, seeds: Batch) -> Generator[Any, Any, None]: ...


class Growing(Flow):
    counts: Counts

    def step(self, seeds: Stream) -> Stream:
        return self.counts.grow(seeds)


NODE = Growing(counts=Counts()).trace().nodes[0]


def growing(seeds: Batch | Unfinished) -> Generator[Batch | Unfinished, Arrived, None]:
    """Every output grows by one a turn, up to its number; unfinished ones know how far they are."""
    grown: dict[int, int] = {}

    def take(arrived: Arrived) -> None:
        if isinstance(arrived, Unfinished):
            grown.update(zip(arrived.items.ids, arrived.items["grown"], strict=True))
        elif isinstance(arrived, Batch):
            grown.update(dict.fromkeys(arrived.repeat(2).ids, 0))

    take(seeds)
    while grown:
        for item in grown:
            grown[item] += 1
        done = [item for item, size in grown.items() if size > item]
        arrived = yield Batch({"size": [grown.pop(item) for item in done]}, done)
        if arrived is GIVE_BACK:
            sizes = list(grown.values())
            so_far = Ragged(torch.zeros(sum(sizes)), sizes)
            yield Unfinished(Batch({"grown": sizes, "so_far": so_far}, list(grown)))
            return
        take(arrived)


def stream_of(made: Stage) -> StageStream:
    return StageStream(NODE, made, clock=map(float, count()).__next__)


def seeds(*ids: int) -> list[Batch]:
    return [Batch({"x": list(ids)}, ids)]


def shown(piece: Piece) -> Any:
    """A piece in short: what is finished, what is given back, or None."""
    if piece is None:
        return None
    if isinstance(piece, Unfinished):
        return ("back", dict(zip(piece.items.ids, piece.items["grown"], strict=True)))
    return piece.ids


def test_what_one_stream_gives_back_another_one_finishes() -> None:
    first = stream_of(growing)
    first.feed(seeds(0, 2))
    pieces = first.run()
    assert [shown(next(pieces)) for _ in range(3)] == [(0,), (1,), None]
    first.give_back()
    back = next(pieces)
    assert shown(back) == ("back", {4: 3, 5: 3})
    assert list(pieces) == []
    assert isinstance(back, Unfinished)
    facts = first.log.facts()
    assert facts["given_back"] == [facts["given_back"][0], "4-5", [3, 3]]

    second = stream_of(growing)
    second.feed(back)
    assert [shown(piece) for piece in second.run()] == [None, (4,), (5,)]
    assert second.log.facts()["items"] == 0, "they are nobody's inputs"


def test_fresh_and_unfinished_items_come_one_after_the_other() -> None:
    stream = stream_of(growing)
    stream.feed(Unfinished(Batch({"grown": [5]}, [5])))
    stream.feed(Unfinished(Batch({"grown": [8]}, [9])))
    stream.feed(seeds(0))
    stream.feed(seeds(1))
    assert [shown(piece) for piece in stream.run()] == [(5,), (9, 0), (1,), (2,), (3,)]
    assert [taken[1] for taken in stream.log.facts()["taken"]] == ["0-1"]  # type: ignore[attr-defined]


def test_what_comes_too_late_is_left_where_it_is() -> None:
    stream = stream_of(growing)
    stream.feed(seeds(0))
    pieces = stream.run()
    next(pieces)
    stream.feed(seeds(1))
    stream.give_back()
    assert [shown(piece) for piece in pieces] == [("back", {1: 1})]
    nothing_begun = stream_of(growing)
    nothing_begun.feed(seeds(1))
    nothing_begun.give_back()
    assert list(nothing_begun.run()) == []


def test_a_stage_may_finish_instead() -> None:
    def stubborn(given: Batch) -> Generator[Any, Any, None]:
        for row in range(2 * len(given)):
            yield given.repeat(2).select([row])

    stream = stream_of(stubborn)
    stream.feed(seeds(3))
    pieces = stream.run()
    assert shown(next(pieces)) == (6,)
    stream.give_back()
    assert [shown(piece) for piece in pieces] == [(7,)]


def test_a_stage_may_hand_on_what_is_finished_first() -> None:
    def tidy(given: Batch) -> Generator[Any, Any, None]:
        outputs = given.repeat(2).with_columns(grown=[0, 0])
        assert (yield outputs.select([])) is GIVE_BACK
        yield outputs.select([0])
        yield Unfinished(outputs.select([1]))

    stream = stream_of(tidy)
    stream.feed(seeds(0))
    pieces = stream.run()
    assert next(pieces) is None
    stream.give_back()
    assert [shown(piece) for piece in pieces] == [(0,), ("back", {1: 0})]


@pytest.mark.parametrize("back", [[0], [0, 1, 2], [0, 0]])
def test_all_that_is_owed_comes_back(back: list[int]) -> None:
    def forgetful(_: Batch) -> Generator[Any, Any, None]:
        while (yield Batch({}, [])) is not GIVE_BACK:
            pass
        yield Unfinished(Batch({"grown": [0] * len(back)}, back))

    stream = stream_of(forgetful)
    stream.feed(seeds(0))
    pieces = stream.run()
    next(pieces)
    stream.give_back()
    with pytest.raises(UserError, match="other ones than all"):
        list(pieces)


def test_nothing_comes_back_unasked() -> None:
    def eager(given: Batch) -> Generator[Any, Any, None]:
        yield Unfinished(given.repeat(2))

    stream = stream_of(eager)
    stream.feed(seeds(0))
    with pytest.raises(UserError, match="unasked"):
        list(stream.run())


def test_a_stage_that_has_given_back_ends() -> None:
    def tireless(given: Batch) -> Generator[Any, Any, None]:
        yield Batch({}, [])
        yield Unfinished(given.repeat(2))
        yield given.repeat(2)

    stream = stream_of(tireless)
    stream.feed(seeds(0))
    pieces = stream.run()
    next(pieces)
    stream.give_back()
    with pytest.raises(UserError, match="handed on items it was not given, or handed on before"):
        list(pieces)


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        ({"resumable": True}, "only a streaming stage"),
        ({"resumable": True, "streaming": True, "sticky": True}, "cannot go on elsewhere"),
    ],
)
def test_declarations_that_contradict_each_other(declared: dict[str, bool], what: str) -> None:
    with pytest.raises(FlowError, match=what):
        stage(**declared)(lambda batch: batch)  # type: ignore[arg-type]


def test_a_stage_that_came_by_pickle_knows_the_signal() -> None:
    """Stages that are pickled by value bring their own reference to it along."""
    assert pickle.loads(pickle.dumps(GIVE_BACK)) is GIVE_BACK


def test_the_graph_tells_what_is_resumable() -> None:
    graph = Growing(counts=Counts()).trace()
    assert graph.nodes[0].resumable
    assert "resumable" in graph.describe()[0]


# --- on a gang ----------------------------------------------------------------------------------


def test_an_order_is_taken_when_all_lanes_of_a_gang_have_it() -> None:
    least = iter([1, 0, 0, 1, 0, 0, 0])  # what another lane has by then
    stream = StageStream(NODE, growing, map(float, count()).__next__, lambda _: next(least))
    stream.feed(seeds(1))
    stream.feed(seeds(0))
    pieces = stream.run()
    assert [shown(next(pieces)) for _ in range(3)] == [None, None, (2,)]
    assert [taken[1] for taken in stream.log.taken] == ["1"]
    assert shown(next(pieces)) == (3, 0)
    assert [taken[1] for taken in stream.log.taken] == ["1", "0"]
    assert [shown(piece) for piece in pieces] == [(1,)]
    assert next(least, None) is None, "one agreement a piece, and one where the stage has ended"


def test_what_other_lanes_have_not_got_is_not_begun() -> None:
    stream = StageStream(NODE, growing, map(float, count()).__next__, lambda _: 0)
    stream.feed(seeds(0))
    stream.give_back()
    assert list(stream.run()) == []
    assert stream.log.facts()["items"] == 0


class Meeting:
    """Threads that play the lanes of a gang, each with a stream of its own."""

    def __init__(self, lanes: int) -> None:
        self._numbers = [0] * lanes
        self._barrier = threading.Barrier(lanes, timeout=20.0)

    def least(self, lane: int, number: int) -> int:
        self._numbers[lane] = number
        self._barrier.wait()
        least = min(self._numbers)
        self._barrier.wait()
        return least


def carried_out(
    meeting: Meeting, lane: int, orders: list[Any], arrivals: list[int]
) -> tuple[list[Any], list[Any]]:
    """What a lane's stream yields, and takes in; after each piece so many more orders come."""
    agree = partial(meeting.least, lane)
    stream = StageStream(NODE, growing, map(float, count()).__next__, agree)
    coming = iter(orders)

    def receive(number: int) -> None:
        for order in islice(coming, number):
            if order is GIVE_BACK:
                stream.give_back()
            else:
                stream.feed(order)

    receive(1)
    yielded = []
    for piece, number in zip(stream.run(), chain(arrivals, repeat(1)), strict=False):
        yielded.append(shown(piece))
        receive(number)
    return yielded, [text for _, text in sorted(stream.log.taken + stream.log.resumed)]


def outputs_of(order: list[Batch] | Unfinished) -> list[int]:
    if isinstance(order, Unfinished):
        return list(order.items.ids)
    return [2 * item + k for item in order[0].ids for k in range(2)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_lanes_of_a_gang_take_the_same_orders_at_the_same_moments(data: st.DataObject) -> None:
    lanes, items = data.draw(st.integers(2, 3)), iter(range(100))
    orders: list[Any] = []
    for size in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)):
        order: Any = seeds(*islice(items, size))
        if data.draw(st.booleans()):
            begun = outputs_of(order)
            order = Unfinished(Batch({"grown": [item // 2 for item in begun]}, begun))
        orders.append(order)
    told = data.draw(st.booleans())
    paces = [data.draw(st.lists(st.integers(0, 3), max_size=8)) for _ in range(lanes)]
    meeting = Meeting(lanes)
    with ThreadPoolExecutor(lanes) as pool:
        ends = [
            pool.submit(carried_out, meeting, lane, [*orders, *[GIVE_BACK] * told], pace)
            for lane, pace in enumerate(paces)
        ]
        first, *others = [end.result(timeout=30.0) for end in ends]
    assert all(other == first for other in others)
    yielded, taken = first
    made: list[int] = []
    for piece in yielded:
        made += () if piece is None else piece[1] if piece[0] == "back" else piece
    size = len(made)
    every = [outputs_of(order) for order in orders]
    assert sorted(made) == sorted(chain(*every))[:size], "each once, and the first ones"
    assert size in {len(list(chain(*every[:n]))) for n in range(1, len(every) + 1)}
    assert len(taken) <= len(orders)
