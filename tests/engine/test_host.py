"""A streaming call on the hosts of a gang: the first lane hands on, the others take part."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from m2flow.engine.messages import LAUNCHER, FeedCall, ItemsProduced, Part, RunCall
from m2flow.flow import SOURCE, Batch, Flow, Stream, Worker, loop, stage
from m2flow.runtime.lane.host import LaneHost
from tests.runtime.test_streams import Meeting

FLOW, STEP, CALL = "step", 0, 7
LANES = (4, 2)


class Doubler(Worker):
    @stage(streaming=True)
    def double(self, batch: Batch) -> Generator[Batch, Batch | None, None]:
        """One item a turn, those that came first."""
        while len(batch):
            first, batch = batch.select([0]), batch.select(range(1, len(batch)))
            arrived = yield first.with_columns(y=[2 * first["x"][0]])
            if arrived is not None:
                batch = Batch.concat([batch, arrived])


class Doubling(Flow):
    doubler: Doubler

    def step(self, items: Stream) -> Stream:
        return self.doubler.double(items)


GRAPH = Doubling(doubler=Doubler()).trace()


def inputs(*items: int) -> tuple[tuple[Part, ...], ...]:
    return ((Part(SOURCE, items, LAUNCHER),),)


def gang() -> list[LaneHost]:
    meeting = Meeting(len(LANES))
    hosts = [
        LaneHost(
            lane,
            {FLOW: GRAPH},
            {"doubler": Doubler()},
            agree={"doubler": partial(meeting.least, n)},
        )
        for n, lane in enumerate(LANES)
    ]
    for host in hosts:
        host.store.put(FLOW, STEP, SOURCE, Batch({"x": list(range(6))}))
    return hosts


def carried_out(host: LaneHost, orders: dict[int, Any]) -> list[Any]:
    """What a call on items 0 and 1 gives; after so many pieces an order comes to the lane."""
    pieces: list[Any] = []
    for piece in host.call(FLOW, RunCall(CALL, 0, STEP, LANES, (inputs(0, 1),) * 2)):
        pieces.append(piece)
        order = orders.get(len(pieces))
        if order is not None:
            assert host.feed(FLOW, order)
    return pieces


def together(hosts: list[LaneHost], *orders: dict[int, Any]) -> list[list[Any]]:
    with ThreadPoolExecutor(len(hosts)) as pool:
        ends = [pool.submit(carried_out, *pair) for pair in zip(hosts, orders, strict=True)]
        return [end.result(timeout=30.0) for end in ends]


def fed(*items: int) -> FeedCall:
    return FeedCall(CALL, 0, STEP, LANES, (inputs(*items),) * len(LANES))


def items_of(pieces: list[Any]) -> list[int]:
    return [item for piece in pieces for item in piece.items]


def test_the_first_lane_hands_on_what_all_have_made() -> None:
    hosts = gang()
    first, second = together(hosts, {1: fed(4)}, {2: fed(4)})
    assert all(isinstance(piece, ItemsProduced) for piece in first)
    assert items_of(first) == [0, 1, 4]
    assert second == [None] * 3
    assert hosts[0].store.gather(FLOW, STEP, [(0, (0, 1, 4))])["y"] == [0, 2, 8]
    for item in (0, 1, 4):
        with pytest.raises(KeyError):
            hosts[1].store.gather(FLOW, STEP, [(0, (item,))])
    call = RunCall(CALL, 0, STEP, LANES, (inputs(0, 1),) * 2)
    spans = [host.finished(FLOW, call, 0.0).spans[0] for host in hosts]
    assert [span.args["items"] for span in spans] == [3, 0]
    assert spans[1].args["ids"] == ""
    assert [host.feed(FLOW, fed(5)) for host in hosts] == [False, False]


def test_what_came_too_late_to_one_lane_is_begun_on_none() -> None:
    first, second = together(gang(), {1: fed(4)}, {})
    assert items_of(first) == [0, 1]
    assert second == [None] * 2


class Sharded(Worker):
    collective = True

    def __init__(self) -> None:
        self.sizes = list[int]()

    @stage
    def turn(self, batch: Batch) -> Batch:
        self.sizes.append(len(batch))
        return batch.with_columns(done=[True] * len(batch))


class Around(Flow):
    sharded: Sharded

    def step(self, items: Stream) -> Stream:
        return loop(self.sharded.turn, until="done")(items)


def test_a_lane_without_a_share_of_a_loops_call_takes_part_with_no_items() -> None:
    """It made the first lane's item again, kept it and told of it."""
    worker = Sharded()
    host = LaneHost(LANES[1], {FLOW: Around(sharded=worker).trace()}, {"sharded": worker})
    host.store.put(FLOW, STEP, SOURCE, Batch({"x": [1]}))
    call = RunCall(CALL, 0, STEP, LANES, (inputs(0), ((),)))
    assert list(host.call(FLOW, call)) == []
    assert worker.sizes == [0]
