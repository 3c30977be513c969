"""The engine told its events one by one: what lanes do together, and what stands on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from m2flow.engine import Engine, StagePlan
from m2flow.engine.messages import (
    CallFinished,
    CompleteStep,
    ExportWeights,
    InstallWeights,
    ItemsProduced,
    MoveState,
    RunCall,
    RunFinish,
    StepSubmitted,
)
from m2flow.errors import PlanError
from tests.engine.toy_flows import (
    Model,
    all_of,
    finish,
    graph_of,
    items_of,
    made,
    only,
    plan_of,
)


def test_finish_runs_on_all_lanes_of_the_worker_at_once() -> None:
    graph = graph_of(lambda a, b, x: b.score(a.train(x)), "a", "b")
    plan = plan_of(
        {"a": [0, 1], "b": [1]},
        stages={"a.train": StagePlan(chunk=1), "b.score": StagePlan(chunk=1)},
        order=("b.score", "a.train"),
    )
    engine = Engine(graph, plan)
    first, second = all_of(RunCall, engine.handle(StepSubmitted(0, 4)))
    finish(engine, first)
    commands = finish(engine, second)
    done = all_of(RunFinish, commands)
    if not done:  # the scorer was on lane 1 first; then the lane is held for the finish
        score = next(c.command for c in engine.calls.values() if c.command.node == 1)
        done = all_of(RunFinish, finish(engine, score))
    assert only(RunFinish, done).lanes == (0, 1)


def test_a_gang_shares_a_call_and_holds_its_lanes() -> None:
    graph = graph_of(lambda a, b, x: b.log(a.roll(x)), "a", "b")
    plan = plan_of({"a": [0], "b": [(0, 1)]}, stages={"b.log": StagePlan(chunk=3)})
    engine = Engine(graph, plan)
    roll = only(RunCall, engine.handle(StepSubmitted(0, 5)))
    assert not all_of(RunCall, engine.handle(made(roll, 0, 1, 2)))  # lane 0 is busy
    engine.handle(made(roll, 3, 4))
    fold = only(RunCall, engine.handle(CallFinished(roll.call, 0)))
    assert fold.lanes == (0, 1)
    assert [items_of(fold, place) for place in (0, 1)] == [(0, 1), (2,)]
    engine.handle(made(fold, 0, 1))
    assert not all_of(RunCall, engine.handle(CallFinished(fold.call, 0)))
    engine.handle(ItemsProduced(fold.call, 1, (2,)))
    last = only(RunCall, engine.handle(CallFinished(fold.call, 1)))
    assert [items_of(last, place) for place in (0, 1)] == [(3,), (4,)]


def test_a_gang_whose_work_others_have_done_lets_its_lanes_go() -> None:
    """It holds its lanes for a step that is complete before they are idle."""
    graph = graph_of(lambda a, b, x: b.log(a.score(x)), "a", "b")
    plan = plan_of({"a": [4, 0], "b": [(0, 1), (2, 3)]}, max_staleness=1)
    engine = Engine(graph, replace(plan, stages={"b.log": StagePlan(chunk=1)}))
    quick = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    slow = only(RunCall, engine.handle(StepSubmitted(1, 2)))
    assert (quick.lanes, slow.lanes) == ((4,), (0,))
    fold = only(RunCall, finish(engine, quick))  # the other gang asks for its lanes
    assert fold.lanes == (2, 3)
    last = only(RunCall, finish(engine, fold))
    assert last.lanes == (2, 3)
    assert only(CompleteStep, finish(engine, last)).step == 0
    commands = finish(engine, slow)  # and here they are
    while engine.calls:
        commands += finish(engine, next(iter(engine.calls.values())).command)
    assert only(CompleteStep, commands).step == 1


def test_a_gang_beside_single_lanes_gets_its_turn() -> None:
    """A replica of one lane comes before it in the plan."""
    graph = graph_of(lambda a, b, x: b.score(a.score(x)), "a", "b")
    plan = plan_of(
        {"a": [0, 1], "b": [2, (0, 1)]},
        stages={"a.score": StagePlan(chunk=1), "b.score": StagePlan(chunk=2)},
    )
    engine = Engine(graph, plan)
    calls = all_of(RunCall, engine.handle(StepSubmitted(0, 12)))
    while scores := [c.command for c in engine.calls.values() if c.command.node == 0]:
        calls += all_of(RunCall, finish(engine, scores[0]))
    assert (0, 1) in [call.lanes for call in calls]


@pytest.mark.parametrize("first", ["a.score", "b.score"])
def test_a_gang_holds_lanes_only_when_nothing_there_is_preferred_to_it(first: str) -> None:
    """Else each other call would be its own, and each would come with a switch."""
    graph = graph_of(lambda a, b, x: b.score(a.score(x)), "a", "b")
    plan = plan_of(
        {"a": [0, 1], "b": [(0, 1)]},
        stages={"a.score": StagePlan(chunk=1), "b.score": StagePlan(chunk=2)},
        order=(first,),
    )
    engine = Engine(graph, plan)
    calls = all_of(RunCall, engine.handle(StepSubmitted(0, 8)))
    while engine.calls:
        running = next(iter(engine.calls.values())).command
        calls += all_of(RunCall, finish(engine, running))
    nodes = [call.node for call in calls]
    assert nodes.count(1) == 4
    assert nodes.index(1) == (8 if first == "a.score" else 3)


def test_a_gang_exports_as_a_whole_also_to_its_own_lanes() -> None:
    """Each lane of it holds a shard only."""
    graph = graph_of(lambda a, b, x: b.log(a.score(x)), "a", "b", publish=[("b", "a")])
    engine = Engine(graph, plan_of({"a": [0, 1], "b": [(0, 1), (2, 3)]}))
    commands = engine.handle(StepSubmitted(0, 2))
    while not all_of(ExportWeights, commands):
        commands += finish(engine, next(iter(engine.calls.values())).command)
    export = only(ExportWeights, commands)
    assert export.lanes == (0, 1)
    assert not all_of(InstallWeights, engine.handle(CallFinished(export.call, 0)))
    installs = all_of(InstallWeights, engine.handle(CallFinished(export.call, 1)))
    assert [(install.lanes, install.local) for install in installs] == [
        ((0,), False),
        ((1,), False),
    ]


def test_states_make_way_for_each_other_the_oldest_first() -> None:
    graph = graph_of(lambda a, b, c, x: a.score(c.score(b.score(a.score(x)))), "a", "b", "c")
    plan = plan_of({"a": [0], "b": [0], "c": [0]}, memory=20, state_bytes=10)
    engine = Engine(graph, plan)
    commands = engine.handle(StepSubmitted(0, 1))
    while engine.calls:
        commands += finish(engine, next(iter(engine.calls.values())).command)
    moves = [
        f"{c.what} {c.worker}" if isinstance(c, MoveState) else graph.nodes[c.node].name
        for c in commands
        if isinstance(c, MoveState | RunCall)
    ]
    assert moves == [
        "onload a", "a.score",
        "onload b", "b.score",
        "offload a", "onload c", "c.score",
        "offload b", "onload a", "a.score#2",
    ]  # fmt: skip


def test_states_that_cannot_stand_together_are_an_error_of_the_plan() -> None:
    graph = graph_of(lambda a, b, x: b.log(a.score(x)), "a", "b", publish=[("b", "a")])
    engine = Engine(graph, plan_of({"a": [0], "b": [0]}, memory=15, state_bytes=10))
    finish(engine, only(RunCall, engine.handle(StepSubmitted(0, 1))))
    log = next(iter(engine.calls.values())).command
    with pytest.raises(PlanError, match="b and a cannot be resident together on lane 0"):
        finish(engine, log)


def test_sticky_items_go_back_to_where_their_state_is() -> None:
    """Also where two stages of the worker were free to take them before either had."""

    def step(a: Model, b: Model, x: Any) -> Any:
        b.log(a.act(x))
        return a.act(x)

    graph = graph_of(step, "a", "b")
    plan = plan_of({"a": [0, 1], "b": [2]})
    chunks = {"a.act": StagePlan(chunk=1), "a.act#2": StagePlan(chunk=1)}
    engine = Engine(graph, replace(plan, stages=chunks))
    commands = engine.handle(StepSubmitted(0, 4))
    while engine.calls:
        commands += finish(engine, next(reversed(engine.calls.values())).command)
    lanes: dict[int, set[tuple[int, ...]]] = {}
    for call in all_of(RunCall, commands):
        if call.node in (0, 1) and graph.nodes[call.node].worker == "a":
            lanes.setdefault(items_of(call)[0], set()).add(call.lanes)
    assert {item: len(homes) for item, homes in lanes.items()} == {0: 1, 1: 1, 2: 1, 3: 1}
