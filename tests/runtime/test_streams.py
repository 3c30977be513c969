"""What a lane demands of a streaming stage, and how the lanes of a gang feed theirs alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.flow import Batch, Flow, Stream, Worker, stage
from m2flow.runtime.lane.streams import StageStream

Stage = Callable[..., Generator[Any, Any, None]]


class Counts(Worker):
    @stage(streaming=True, expands=2)
    def grow(self, seeds: Batch) -> Generator[Any, Any, None]: ...


class Growing(Flow):
    counts: Counts

    def step(self, seeds: Stream) -> Stream:
        return self.counts.grow(seeds)


NODE = Growing(counts=Counts()).trace().nodes[0]


def growing(seeds: Batch) -> Generator[Batch, Batch | None, None]:
    """Every output grows by one a turn, up to its number."""
    grown: dict[int, int] = dict.fromkeys(seeds.repeat(2).ids, 0)
    while grown:
        for item in grown:
            grown[item] += 1
        done = [item for item, size in grown.items() if size > item]
        arrived = yield Batch({"size": [grown.pop(item) for item in done]}, done)
        if arrived is not None:
            grown.update(dict.fromkeys(arrived.repeat(2).ids, 0))


def stream_of(made: Stage) -> StageStream:
    return StageStream(NODE, made, clock=map(float, count()).__next__)


def seeds(*ids: int) -> list[Batch]:
    return [Batch({"x": list(ids)}, ids)]


def shown(piece: Batch | None) -> Any:
    """A piece in short: what is finished, or None."""
    return None if piece is None else piece.ids


def test_items_that_come_together_are_taken_together() -> None:
    stream = stream_of(growing)
    stream.feed(seeds(0))
    stream.feed(seeds(1))
    assert [shown(piece) for piece in stream.run()] == [(0,), (1,), (2,), (3,)]
    assert [taken[1] for taken in stream.log.facts()["taken"]] == ["0-1"]  # type: ignore[attr-defined]


def test_items_that_come_while_the_stage_runs_are_sent_to_it() -> None:
    stream = stream_of(growing)
    stream.feed(seeds(0))
    pieces = stream.run()
    assert shown(next(pieces)) == (0,)
    stream.feed(seeds(1))
    assert [shown(piece) for piece in pieces] == [(1,), None, (2,), (3,)]


def test_a_stage_that_keeps_items_is_refused() -> None:
    def forgetful(given: Batch) -> Generator[Any, Any, None]:
        yield given.repeat(2).select([0])

    stream = stream_of(forgetful)
    stream.feed(seeds(3))
    with pytest.raises(UserError, match="ended with 1 items not handed on"):
        list(stream.run())


def test_a_stage_that_hands_items_on_twice_is_refused() -> None:
    def tireless(given: Batch) -> Generator[Any, Any, None]:
        yield given.repeat(2)
        yield given.repeat(2)

    stream = stream_of(tireless)
    stream.feed(seeds(0))
    with pytest.raises(UserError, match="handed on items it was not given, or handed on before"):
        list(stream.run())


# --- on a gang ----------------------------------------------------------------------------------


def test_items_are_taken_when_all_lanes_of_a_gang_have_them() -> None:
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
    assert list(stream.run()) == []
    assert stream.log.facts()["items"] == 0


class Meeting:
    """Threads that play the lanes of a gang, each with a stream of its own."""

    def __init__(self, lanes: int) -> None:
        self._numbers = [0] * lanes
        self._barrier = threading.Barrier(lanes, timeout=60.0)

    def least(self, lane: int, number: int) -> int:
        self._numbers[lane] = number
        self._barrier.wait()
        least = min(self._numbers)
        self._barrier.wait()
        return least


def carried_out(
    meeting: Meeting, lane: int, fed: list[list[Batch]], arrivals: list[int]
) -> tuple[list[Any], list[Any]]:
    """What a lane's stream yields, and takes in; after each piece so many more Batches come."""
    agree = partial(meeting.least, lane)
    stream = StageStream(NODE, growing, map(float, count()).__next__, agree)
    coming = iter(fed)

    def receive(number: int) -> None:
        for batches in islice(coming, number):
            stream.feed(batches)

    receive(1)
    yielded = []
    for piece, number in zip(stream.run(), chain(arrivals, repeat(1)), strict=False):
        yielded.append(shown(piece))
        receive(number)
    return yielded, [text for _, text in stream.log.taken]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_lanes_of_a_gang_take_the_same_items_at_the_same_moments(data: st.DataObject) -> None:
    lanes, items = data.draw(st.integers(2, 3)), iter(range(100))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    fed = [seeds(*islice(items, size)) for size in sizes]
    paces = [data.draw(st.lists(st.integers(0, 3), max_size=8)) for _ in range(lanes)]
    meeting = Meeting(lanes)
    with ThreadPoolExecutor(lanes) as pool:
        ends = [
            pool.submit(carried_out, meeting, lane, fed, pace) for lane, pace in enumerate(paces)
        ]
        first, *others = [end.result(timeout=30.0) for end in ends]
    assert all(other == first for other in others)
    yielded, taken = first
    made = [item for piece in yielded if piece is not None for item in piece]
    every = [[2 * item + k for item in order[0].ids for k in range(2)] for order in fed]
    assert sorted(made) == sorted(chain(*every))[: len(made)], "each once, and the first ones"
    assert len(made) in {len(list(chain(*every[:n]))) for n in range(1, len(every) + 1)}
    assert len(taken) <= len(fed)
