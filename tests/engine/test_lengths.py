"""Longest first: where a stage says how long its items take, the long ones do not come last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import m2flow
from m2flow import Batch, Flow, Ragged, Stream, Worker, stage
from m2flow.engine import Engine, LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.messages import FeedCall, ItemsProduced, RunCall, StepSubmitted
from m2flow.engine.ready import LongestFirst, LowestFirst
from m2flow.errors import UserError
from m2flow.flow import SOURCE, loop
from m2flow.runtime.lane.reports import item_lengths
from tests.engine.toy_flows import all_of, finish, items_of, only


@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_a_queue_against_a_sorted_list(lengths: list[int], data: st.DataObject) -> None:
    known = {unit: float(length) for unit, length in enumerate(lengths)}
    for queue, key in (
        (LowestFirst(), lambda unit: (0.0, unit)),
        (LongestFirst(known), lambda unit: (-known[unit], unit)),
    ):
        waiting = set()
        for unit in known:
            queue.push(unit)
            waiting.add(unit)
        while waiting:
            end, amount = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 4))
            expected = sorted((unit for unit in waiting if unit < end), key=key)[:amount]
            assert queue.take(amount, end) == expected
            waiting -= set(expected)
            assert len(queue) == len(waiting)
            if data.draw(st.booleans()):
                break
        assert sorted(queue.drain()) == sorted(waiting)
        assert len(queue) == 0


class Model(Worker):
    def __init__(self, column: str = "tokens") -> None:
        self.column, self.seen = column, list[tuple[int, ...]]()

    @stage(streaming=True, length="size")
    def roll(self, batch: Batch) -> Batch: ...

    @stage
    def count(self, batch: Batch) -> Batch:
        return batch.with_columns(**{self.column: batch["x"]})

    @stage(length="tokens")
    def train(self, batch: Batch) -> Batch:
        self.seen.append(batch.ids)
        return batch


class Rolling(Flow):
    model: Model

    def step(self, items: Stream) -> Stream:
        return self.model.roll(items)


class Training(Flow):
    model: Model

    def step(self, items: Stream) -> Stream:
        return self.model.train(self.model.count(items))


def plan(**stages: StagePlan) -> Plan:
    named = {f"model.{name}": settings for name, settings in stages.items()}
    return Plan("eager", (LaneSpec(0),), {"model": Placement(((0,),))}, named)


def test_the_longest_are_started_and_fed_first() -> None:
    engine = Engine(Rolling(model=Model()).trace(), plan(roll=StagePlan(chunk=2, max_running=2)))
    roll = only(RunCall, engine.handle(StepSubmitted(0, 5, (1.0, 5.0, 3.0, 9.0, 3.0))))
    assert items_of(roll) == (1, 3)
    fed = [items_of(only(FeedCall, engine.handle(ItemsProduced(roll.call, roll.lanes[0], (done,)))))
           for done in (3, 1, 2)]  # fmt: skip
    assert fed == [(2,), (4,), (0,)]


def test_without_lengths_the_order_is_that_of_the_items() -> None:
    engine = Engine(Rolling(model=Model()).trace(), plan(roll=StagePlan(chunk=2)))
    roll = only(RunCall, engine.handle(StepSubmitted(0, 5)))
    assert items_of(roll) == (0, 1)
    assert items_of(only(RunCall, all_of(RunCall, finish(engine, roll)))) == (2, 3)


def test_a_stage_reports_lengths_to_the_one_that_reads_them() -> None:
    flow = Training(model=Model())
    chunks = plan(count=StagePlan(), train=StagePlan(chunk=2))
    with m2flow.launch(flow, items_per_step=5, plan=chunks) as run:
        output = run.step(Batch({"x": [1, 5, 3, 9, 2]})).output
    assert flow.model.seen == [(1, 3), (2, 4), (0,)]
    assert output.ids == (0, 1, 2, 3, 4)


def test_what_counts_as_a_length() -> None:
    graph = Rolling(model=Model()).trace()
    assert item_lengths(graph, SOURCE, Batch({"size": [2, 0.5]})) == (2.0, 0.5)
    torch = pytest.importorskip("torch")
    assert item_lengths(graph, SOURCE, Batch({"size": torch.tensor([2, 1])})) == (2.0, 1.0)
    ragged = Ragged(torch.zeros(3), [3, 0])
    assert item_lengths(graph, SOURCE, Batch({"size": ragged})) == (3.0, 0.0)
    assert item_lengths(graph, 0, Batch({"size": [1]})) == ()  # nobody reads it


def test_a_length_that_is_not_there_or_no_number_is_refused() -> None:
    with (
        m2flow.launch(Training(model=Model("token")), items_per_step=1, plan=plan()) as run,
        pytest.raises(UserError, match=r"tokens: is declared as the length of model\.train"),
    ):
        run.step(Batch({"x": [1]}))
    with pytest.raises(UserError, match=r"size: .*holds no numbers"):
        item_lengths(Rolling(model=Model()).trace(), SOURCE, Batch({"size": ["long"]}))


class Talker(Worker):
    @stage
    def turn(self, batch: Batch) -> Batch: ...


class Tools(Worker):
    @stage
    def call(self, batch: Batch) -> Batch: ...


class Talk(Flow):
    talker: Talker
    tools: Tools

    def step(self, items: Stream) -> Stream:
        return loop(self.talker.turn, self.tools.call)(items)


def test_who_has_gone_around_most_often_is_taken_first() -> None:
    """The nearest to its end, and not the lowest number."""
    spots = {"talker": Placement(((0,),)), "tools": Placement(((1,), (2,)))}
    stages = {"talker.turn": StagePlan(chunk=1), "tools.call": StagePlan(chunk=1)}
    lanes = tuple(map(LaneSpec, range(3)))
    engine = Engine(
        Talk(talker=Talker(), tools=Tools()).trace(), Plan("spread", lanes, spots, stages)
    )
    running = {}

    def note(commands: list[Any]) -> None:
        for call in all_of(RunCall, commands):
            running[call.node, items_of(call)] = call

    def done(node: int, item: int) -> list[Any]:
        commands = finish(engine, running.pop((node, (item,))))
        note(commands)
        return commands

    note(engine.handle(StepSubmitted(0, 3)))
    done(0, 0)  # the call of 0 takes long
    done(0, 1)
    done(1, 1)  # once around
    done(0, 2)
    done(0, 1)
    done(1, 2)
    done(1, 1)  # twice around, and waits
    done(1, 0)  # once around, and waits
    assert set(running) == {(0, (2,))}
    assert items_of(only(RunCall, [c for c in done(0, 2) if getattr(c, "node", 1) == 0])) == (1,)
