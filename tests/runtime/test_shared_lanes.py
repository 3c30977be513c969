"""Several lanes in one process work as lanes of their own do; items pass by reference."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator

import pytest
import torch
from ray import cloudpickle

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import UserError
from m2flow.flow import Batch, Flow, Stream, Worker, stage
from m2flow.plan import build_plan
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.lane.shared import await_order
from tests.runtime.local_cluster import local_cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LANES = tuple(LaneSpec(number) for number in range(6))
ITEMS = 12


class Maker(Worker):
    """Doubles numbers, one at a time, whenever nothing comes for a while."""

    @stage(streaming=True)
    def make(self, items: Batch) -> Generator[Batch, Batch | None, None]:
        waiting = items
        while len(waiting):
            await_order(self.place.lane, 0.01)
            done, rest = waiting.select([0]), waiting.select(range(1, len(waiting)))
            lane = torch.tensor([self.place.lane])
            arrived = yield done.with_columns(doubled=2 * done["number"], lane=lane)
            waiting = rest if arrived is None else Batch.concat([rest, arrived])


class Adder(Worker):
    """Adds up what it is given."""

    @stage(accumulates=True)
    def add(self, items: Batch) -> Batch:
        self.total = getattr(self, "total", 0) + int(items["doubled"].sum())
        return items

    @add.finish
    def add_finish(self) -> dict[str, float]:
        return {"total": float(getattr(self, "total", 0))}


class Summing(Adder):
    """Wants to sum over its lanes."""

    @stage(accumulates=True)
    def add(self, items: Batch) -> Batch:
        return items

    @add.finish
    def add_finish(self) -> dict[str, float]:
        self.place.all_reduce([torch.ones(1)])
        return {}


class Doubling(Flow):
    maker: Maker
    adder: Adder

    def step(self, items: Stream) -> Stream:
        return self.adder.add(self.maker.make(items))


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with local_cluster(1), LanePool(LANES, lanes_per_process=4) as lanes:
        yield lanes


def _batch() -> Batch:
    return Batch({"number": torch.arange(ITEMS)})


def _apart(makers: tuple[int, ...], adders: tuple[int, ...]) -> Plan:
    placements = {
        "maker": Placement(tuple((lane,) for lane in makers)),
        "adder": Placement(tuple((lane,) for lane in adders)),
    }
    stages = {"maker.make": StagePlan(chunk=1, max_running=2), "adder.add": StagePlan(chunk=1)}
    return Plan("apart", LANES, placements, stages)


def test_lanes_of_a_process_are_lanes(pool: LanePool) -> None:
    processes = {address.process_id for address in pool.addresses.values()}
    assert len(processes) == 2
    assert len({address.peer for address in pool.addresses.values()}) == len(LANES)


@pytest.mark.parametrize("mode", ["collocated", "apart"])
def test_a_flow_runs_on_them(pool: LanePool, mode: str) -> None:
    """Apart: makers in the first process, adders in both, so items cross processes too."""
    flow = Doubling(maker=Maker(), adder=Adder())
    plan = _apart((0, 1), (2, 3, 4, 5))
    if mode == "collocated":
        plan = build_plan("collocated", flow.trace(), LANES, ITEMS)
    with launch(flow, items_per_step=ITEMS, plan=plan, lanes=pool) as run:
        for _ in range(2):
            result = run.step(_batch())
            assert result.output["doubled"].tolist() == [2 * n for n in range(ITEMS)]
            assert len(set(result.output["lane"].tolist())) > 1
    fed = [span for span in result.spans if span.name == "maker.make"]
    assert sum(int(str(span.args["items"])) for span in fed) == ITEMS


def test_they_refuse_collectives(pool: LanePool) -> None:
    flow = Doubling(maker=Maker(), adder=Summing())
    plan = build_plan("collocated", flow.trace(), LANES, ITEMS)
    with (
        pytest.raises(UserError, match="no collectives"),
        launch(flow, items_per_step=ITEMS, plan=plan, lanes=pool) as run,
    ):
        run.step(_batch())


def test_waiting_for_an_order_ends_alone_on_other_lanes() -> None:
    assert await_order(99, 0.0) is False
