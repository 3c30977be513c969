"""Switch points: when a tail begins, who goes on with it, and what becomes of the freed lanes."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

import m2flow
from m2flow.engine import Engine, LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.messages import (
    CallFinished,
    Command,
    FeedCall,
    GiveBack,
    ItemsGivenBack,
    ItemsProduced,
    Part,
    ReleaseItems,
    RunCall,
    StepSubmitted,
    given_back,
)
from m2flow.flow import GIVE_BACK, SOURCE, Arrived, Batch, Flow, Stream, Unfinished, Worker, stage
from m2flow.plan import validate
from m2flow.simulation.driver import Simulation
from tests.engine.test_engine import all_of, items_of, only

PAIRS = 2
"""Outputs of an item."""


class Long(Worker):
    @stage(streaming=True, expands=PAIRS, resumable=True)
    def draw(self, prompts: Any) -> Any: ...

    @stage
    def score(self, samples: Any) -> Any: ...


class Flowing(Flow):
    drawer: Long
    scorer: Long

    def step(self, prompts: Stream) -> Stream:
        return self.scorer.score(self.drawer.draw(prompts))


GRAPH = Flowing(drawer=Long(), scorer=Long()).trace()
DRAW, SCORE = 0, 1


def plan_of(lanes: int = 2, **switch: Any) -> Plan:
    """Everything on all lanes; an equal share of four prompts on each."""
    spots = tuple((lane,) for lane in range(lanes))
    placements = {"drawer": Placement(spots), "scorer": Placement(spots)}
    stages = {"drawer.draw": StagePlan(4 // lanes, **switch), "scorer.score": StagePlan(1)}
    plan = Plan("custom", tuple(map(LaneSpec, range(lanes))), placements, stages)
    validate(plan, GRAPH, 4)
    return plan


class Told:
    """An engine, with the commands that it has given."""

    def __init__(self, plan: Plan, num_items: int = 4) -> None:
        self.engine = Engine(GRAPH, plan)
        self.heard = self.engine.handle(StepSubmitted(0, num_items))
        self.calls = {c.lanes[0]: c for c in all_of(RunCall, self.heard) if c.node == DRAW}

    def made(self, lane: int, *items: int) -> list[Command]:
        return self.engine.handle(ItemsProduced(self.calls[lane].call, items))

    def back(self, lane: int, *items: int) -> list[Command]:
        return self.engine.handle(ItemsGivenBack(self.calls[lane].call, items))

    def ended(self, lane: int) -> list[Command]:
        return self.engine.handle(CallFinished(self.calls[lane].call, lane))


def test_the_tail_begins_when_the_share_of_outputs_is_done() -> None:
    told = Told(plan_of(switch_at=0.5))
    assert [items_of(call) for call in told.calls.values()] == [(0, 1), (2, 3)]
    assert not all_of(GiveBack, told.made(0, 0, 1, 2))
    asked = only(GiveBack, told.made(1, 7))
    assert (asked.call, asked.lanes) == (told.calls[1].call, (1,))
    assert not all_of(GiveBack, told.made(1, 6)), "once"


def test_a_kept_call_is_fed_what_others_gave_back_though_it_is_never_fed_else() -> None:
    plan = plan_of(switch_at=0.5)
    plan = replace(plan, stages={**plan.stages, "drawer.draw": StagePlan(1, None, 0.4, 1)})
    told = Told(plan, num_items=2)
    told.made(0, 0)
    assert only(GiveBack, told.made(1, 2)).lanes == (1,)
    fed = only(FeedCall, told.back(1, 3))
    assert (fed.call, fed.lanes) == (told.calls[0].call, (0,))
    assert fed.unfinished == (3,)
    assert items_of(fed) == (), "the inputs are not read again"
    commands = told.ended(1)
    scored = [c for c in all_of(RunCall, commands) if c.node == SCORE]
    assert [c.lanes for c in scored] == [(1,)], "the freed lane goes on with the next stage"
    done = [(c.producer, c.items) for c in all_of(ReleaseItems, told.made(0, 3))]
    assert done == [(SOURCE, (1,)), (given_back(DRAW), (3,))]


def test_a_kept_call_holds_no_more_outputs_than_it_may_begin_with() -> None:
    told = Told(plan_of(switch_at=0.3))
    told.made(0, 0)
    assert only(GiveBack, told.made(0, 2, 1)).lanes == (1,)
    fed = only(FeedCall, told.back(1, 4, 5, 6, 7))
    assert fed.unfinished == (4, 5), "with one of its own it has three of four"
    assert only(FeedCall, told.made(0, 3, 4)).unfinished == (6, 7)


def test_of_gangs_one_gives_back_and_another_goes_on() -> None:
    plan = plan_of(switch_at=0.5)
    pairs = {"drawer": Placement(((0, 1), (2, 3))), "scorer": Placement(((3,), (1,)))}
    plan = replace(plan, lanes=tuple(map(LaneSpec, range(4))), placements=pairs)
    validate(plan, GRAPH, 4)
    told = Told(plan)
    assert only(GiveBack, told.made(0, 0, 1, 2, 3)).lanes == (2, 3)
    fed = only(FeedCall, told.back(2, 4, 5, 6, 7))
    assert (fed.lanes, fed.unfinished) == ((0, 1), (4, 5, 6, 7))
    told.engine.handle(CallFinished(told.calls[2].call, 3))
    scored = [c for c in all_of(RunCall, told.ended(2)) if c.node == SCORE]
    assert [c.lanes for c in scored] == [(3,)], "lane 1 still draws"


def test_an_idle_kept_replica_begins_a_call_with_what_was_given_back() -> None:
    told = Told(plan_of(switch_at=0.7))
    told.made(0, 0, 1, 2, 3)
    commands = told.ended(0)  # takes up the scoring of its own samples, one after the other
    scoring = only(RunCall, commands)
    assert only(GiveBack, told.made(1, 4, 6)).lanes == (1,)
    assert not all_of(FeedCall, told.back(1, 5, 7))
    assert all(c.node == SCORE for c in all_of(RunCall, told.ended(1)))
    told.engine.handle(ItemsProduced(scoring.call, (0,)))
    again = only(RunCall, told.engine.handle(CallFinished(scoring.call, 0)))
    assert (again.node, again.lanes, again.unfinished) == (DRAW, (0,), (5, 7))
    assert again.inputs == (((Part(SOURCE, ()),),),)


def test_items_that_were_never_begun_are_read_from_their_inputs() -> None:
    plan = plan_of(switch_at=0.25)
    told = Told(plan)
    asked = only(GiveBack, told.made(0, 0, 1))
    assert asked.lanes == (1,)
    commands = told.ended(1)  # it had not even begun
    fed = only(FeedCall, commands)
    assert (items_of(fed), fed.unfinished) == ((2,), ())


def test_several_kept_calls_share_the_rest_evenly() -> None:
    plan = plan_of(4, switch_at=0.01, keep=2)
    plan = replace(plan, stages={**plan.stages, "drawer.draw": StagePlan(2, None, 0.2, 2)})
    told = Told(plan, num_items=8)
    told.made(0, 0, 1)
    asked = all_of(GiveBack, told.made(1, 4, 5))
    assert [command.lanes for command in asked] == [(2,), (3,)]
    fed = all_of(FeedCall, told.back(2, 8, 9, 10, 11)) + all_of(FeedCall, told.back(3, 12, 13))
    assert [(command.lanes, command.unfinished) for command in fed] == [
        ((0,), (8, 9)),
        ((1,), (10, 11)),
    ]


def test_a_lane_that_does_not_go_on_takes_no_new_items_either() -> None:
    plan = plan_of(switch_at=0.25)
    plan = replace(plan, stages={**plan.stages, "drawer.draw": StagePlan(1, None, 0.25, 1)})
    told = Told(plan)
    assert [items_of(call) for call in told.calls.values()] == [(0,), (1,)]
    commands = told.made(1, 2, 3)
    assert only(GiveBack, commands).lanes == (1,)
    commands = told.ended(1)
    assert all(command.node == SCORE for command in all_of(RunCall, commands))


class Lengths:
    """Samples take as long as they are; every call of another stage takes a second."""

    def __init__(self, lengths: list[float]) -> None:
        self.lengths = lengths

    def call(self, node: Any, num_items: int) -> float:
        return 1.0 * num_items

    def item(self, node: Any, step: int, item: int) -> float:
        return self.lengths[item]

    def finish(self, node: Any) -> float:
        return 0.0

    def publish(self, source: str, target: str | None) -> float:
        return 0.0

    def move(self, worker: str, what: str) -> float:
        return 0.0

    def item_bytes(self, node: Any) -> int:
        return 1

    def leaves(self, node: Any, step: int, item: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("plan", "end"), [(plan_of(), 14.0), (plan_of(switch_at=0.7, keep=1), 11.0)]
)
def test_in_virtual_time_a_freed_lane_scores_while_the_other_goes_on(
    plan: Plan, end: float
) -> None:
    """Both lanes have one long sample: apart they keep both busy, together only one."""
    costs = Lengths([1, 1, 1, 10, 1, 1, 1, 10])
    run = Simulation(GRAPH, plan, costs).run(4, 1)
    assert run.step_ends[0] == end
    assert all(times == 1 for times in run.worked_on.values())
    draws = [(span.lane, span.start, span.end) for span in run.spans if span.name == "drawer.draw"]
    if plan.stages["drawer.draw"].switch_at is not None:
        assert sorted(draws) == [(0, 0.0, 10.0), (1, 0.0, 1.0)], "nothing is drawn twice"


# --- one process: a stage that is a pure function may stand on several lanes ----------------------


@stage(streaming=True, expands=PAIRS, resumable=True)
def walk(starts: Batch | Unfinished) -> Generator[Batch | Unfinished, Arrived, None]:
    """A sample walks from its number for a while; its path must not depend on who saw it walk."""
    paths: dict[int, list[int]] = {}

    def take(arrived: Arrived) -> None:
        if isinstance(arrived, Unfinished):
            paths.update(zip(arrived.items.ids, arrived.items["path"], strict=True))
        elif isinstance(arrived, Batch):
            paths.update({item: [item] for item in arrived.repeat(PAIRS).ids})

    take(starts)
    while paths:
        for path in paths.values():
            path.append((path[-1] * 31 + len(path)) % 97)
        done = [item for item, path in paths.items() if len(path) > item * item % 13]
        arrived = yield Batch({"path": [paths.pop(item) for item in done]}, done)
        if arrived is GIVE_BACK:
            yield Unfinished(Batch({"path": list(paths.values())}, list(paths)))
            return
        take(arrived)


@stage
def weigh(walks: Batch) -> Batch:
    return walks.with_columns(weight=[sum(path) for path in walks["path"]])


class Walking(Flow):
    def step(self, starts: Stream) -> Stream:
        return weigh(walk(starts))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("keep", [1, 2])
def test_one_process_gives_the_same_with_a_switch_point(share: float, keep: int) -> None:
    items = Batch({"x": list(range(9))})
    with m2flow.launch(Walking(), items_per_step=9, mode="eager", lanes="cpu:1") as run:
        plain = run.step(items)
    spots = Placement(((0,), (1,), (2,)))
    plan = Plan(
        "eager",
        tuple(map(LaneSpec, range(3))),
        {"walk": spots, "weigh": spots},
        {"walk": StagePlan(3, None, share, keep), "weigh": StagePlan(2)},
    )
    with m2flow.launch(Walking(), items_per_step=9, plan=plan) as run:
        results = list(run.steps([items, items]))
    for result in results:
        assert result.output.ids == plain.output.ids
        assert result.output["path"] == plain.output["path"]
        assert result.output["weight"] == plain.output["weight"]
        passed_on = [span for span in result.spans if span.name == "give back walk"]
        assert passed_on or share != 0.5  # else others had not begun, or had ended
        assert {span.lane for span in passed_on} <= set(range(keep, 3))
