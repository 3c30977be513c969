"""The engine told its events one by one: streaming calls, loops, and limits of edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m2flow.engine import EdgePlan, Engine, StagePlan
from m2flow.engine.messages import (
    LAUNCHER,
    CallFinished,
    Command,
    CompleteStep,
    ExportWeights,
    FeedCall,
    InstallWeights,
    ItemsProduced,
    Part,
    ReleaseItems,
    RunCall,
    StepSubmitted,
)
from m2flow.flow import SOURCE, loop
from tests.engine.toy_flows import (
    APART,
    CHAIN,
    STREAM,
    all_of,
    finish,
    graph_of,
    items_of,
    made,
    normalise,
    only,
    plan_of,
    streaming,
)

# --- streaming calls ----------------------------------------------------------------------------


def test_a_streaming_call_is_fed_as_its_items_finish() -> None:
    engine = Engine(STREAM, streaming(max_running=2))
    first, second = all_of(RunCall, engine.handle(StepSubmitted(0, 6)))
    assert (items_of(first), items_of(second)) == ((0, 1), (2, 3))
    assert all_of(FeedCall, engine.handle(made(first, 0))) == []  # one more to come
    commands = engine.handle(made(first, 1))
    fed = only(FeedCall, commands)
    assert (fed.call, fed.lanes, items_of(fed)) == (first.call, (0,), (4,))
    assert only(ReleaseItems, commands) == ReleaseItems(0, SOURCE, (0,), (0,))
    fed = only(FeedCall, engine.handle(made(second, 4, 5)))
    assert (fed.call, fed.lanes, items_of(fed)) == (second.call, (1,), (5,))


def test_items_fed_to_a_call_that_had_ended_go_to_another_one() -> None:
    engine = Engine(STREAM, streaming(max_running=1))
    first, second = all_of(RunCall, engine.handle(StepSubmitted(0, 3)))
    fed = only(FeedCall, engine.handle(made(first, 0, 1)))
    assert items_of(fed) == (2,)
    again = only(RunCall, engine.handle(CallFinished(first.call, 0)))  # it had run dry before
    assert items_of(again) == (2,)
    assert again.call not in (first.call, second.call)
    finish(engine, second, expands=2)
    commands = finish(engine, again, expands=2)
    assert only(CompleteStep, commands).step == 0
    assert not engine.calls


def test_without_a_limit_a_streaming_call_takes_all_and_is_not_fed() -> None:
    engine = Engine(STREAM, streaming(chunk=2))
    calls = all_of(RunCall, engine.handle(StepSubmitted(0, 5)))
    assert [items_of(call) for call in calls] == [(0, 1), (2, 3)]
    assert engine.handle(ItemsProduced(calls[0].call, 0, (0, 1))) == [
        ReleaseItems(0, SOURCE, (0,), (0,))
    ]
    engine.handle(ItemsProduced(calls[0].call, 0, (2, 3)))
    assert items_of(only(RunCall, engine.handle(CallFinished(calls[0].call, 0)))) == (4,)


def test_a_lane_that_is_held_is_not_fed() -> None:
    """New weights wait for the lane, so the call that runs there is let run dry."""
    graph = graph_of(lambda a, b, x: b.log(a.roll(x)), "a", "b", publish=[("b", "a")])
    plan = replace(APART, stages={"a.roll": StagePlan(max_running=1)}, max_staleness=1)
    engine = Engine(graph, plan)
    roll = only(RunCall, engine.handle(StepSubmitted(0, 1)))
    engine.handle(made(roll, 0))
    roll = only(
        RunCall, engine.handle(CallFinished(roll.call, 0)) + engine.handle(StepSubmitted(1, 2))
    )
    log = next(call.command for call in engine.calls.values() if call.command.node == 1)
    export = only(ExportWeights, finish(engine, log))
    finish(engine, export)
    assert all_of(FeedCall, engine.handle(made(roll, 0))) == []
    install = only(InstallWeights, engine.handle(CallFinished(roll.call, 0)))
    again = only(RunCall, [c for c in finish(engine, install) if getattr(c, "node", 9) == 0])
    assert items_of(again) == (1,)


def test_all_lanes_of_a_gang_get_all_items_of_a_streaming_call() -> None:
    plan = plan_of({"a": [(1, 0)]}, stages={"a.sample": StagePlan(max_running=2)})
    engine = Engine(STREAM, plan)
    call = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    assert call.lanes == (1, 0)
    assert call.inputs == (((Part(SOURCE, (0, 1), LAUNCHER),),),) * 2
    fed = only(FeedCall, engine.handle(made(call, 0, 1)))
    assert (fed.lanes, items_of(fed)) == ((1, 0), (2,))


def test_a_gang_of_which_a_lane_has_ended_is_not_fed() -> None:
    """The other lane is at its end as well: they have agreed on it."""
    plan = plan_of({"a": [(0, 1)]}, stages={"a.sample": StagePlan(max_running=1)})
    engine = Engine(STREAM, plan)
    call = only(RunCall, engine.handle(StepSubmitted(0, 3)))
    fed = only(FeedCall, engine.handle(made(call, 0, 1)))
    assert items_of(fed) == (1,)
    assert engine.handle(CallFinished(call.call, 1)) == []
    again = only(RunCall, engine.handle(CallFinished(call.call, 0)))
    assert items_of(again) == (1,), "it came too late"
    engine.handle(CallFinished(again.call, 1))
    commands = engine.handle(made(again, 2, 3))  # on its way before
    assert all_of(FeedCall, commands) == []
    last = only(RunCall, engine.handle(CallFinished(again.call, 0)))
    assert items_of(last) == (2,)


def test_others_are_fed_when_the_least_busy_lane_is_held() -> None:
    graph = graph_of(lambda a, b, x: b.score(a.roll(x)), "a", "b")
    plan = plan_of(
        {"a": [0, 1], "b": [(0, 2)]},
        stages={"a.roll": StagePlan(max_running=2), "b.score": StagePlan(chunk=1)},
    )
    engine = Engine(graph, plan)
    first, second = all_of(RunCall, engine.handle(StepSubmitted(0, 8)))
    commands = engine.handle(made(first, 0))  # the gang holds lane 0 from now on
    assert [fed.lanes for fed in all_of(FeedCall, commands)] in ([], [(0,)])
    engine.handle(made(first, 1))
    fed = all_of(FeedCall, engine.handle(made(second, 2)))
    assert [feed.lanes for feed in fed] == [(1,)]


# --- loops --------------------------------------------------------------------------------------


def test_an_item_may_be_back_before_the_call_that_made_it_has_ended() -> None:
    graph = graph_of(lambda a, x: loop(a.score)(x), "a")
    engine = Engine(graph, plan_of({"a": [0, 1]}, fuse_loops=False))
    first = only(RunCall, engine.handle(StepSubmitted(0, 1)))
    again = only(RunCall, engine.handle(made(first, 0)))
    assert (again.lanes, items_of(again)) == ((1,), (0,))
    engine.handle(CallFinished(first.call, 0))
    assert only(CompleteStep, finish(engine, again, leaving=[0])).step == 0


def test_a_loop_reads_what_left_another_loop_half_way() -> None:
    graph = graph_of(lambda a, b, x: loop(b.score)(loop(a.score, a.act)(x)), "a", "b")
    stages = {"b.score": StagePlan(chunk=1)}
    engine = Engine(graph, plan_of({"a": [0], "b": [1]}, stages=stages, fuse_loops=False))
    score = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    act, second = all_of(RunCall, finish(engine, score, leaving=[1]))
    assert (((Part(0, (1,), 0),),),) in (second.inputs, act.inputs)
    act, second = sorted((act, second), key=lambda call: call.lanes)
    commands = finish(engine, second, leaving=[1]) + finish(engine, act, leaving=[0])
    last = next(c for c in reversed(commands) if isinstance(c, RunCall))
    assert last.inputs == (((Part(1, (0,), 0),),),)
    released = {(c.producer, c.items) for c in all_of(ReleaseItems, finish(engine, last, [0]))}
    assert (1, (0,)) in released


def test_turns_are_counted_by_the_last_member() -> None:
    graph = graph_of(lambda a, x: loop(a.score, a.act, max_turns=2)(x), "a")
    engine = Engine(graph, plan_of({"a": [0]}, fuse_loops=False))
    commands = engine.handle(StepSubmitted(0, 1))
    calls = []
    while engine.calls:
        call = next(iter(engine.calls.values())).command
        calls.append(graph.nodes[call.node].name)
        commands += finish(engine, call)
    assert calls == ["a.score", "a.act", "a.score", "a.act"]


# --- limits of edges ----------------------------------------------------------------------------


def run_out(engine: Engine, num_bytes: int = 8, num_items: int = 6) -> list[RunCall]:
    """Play a step to its end, one item's bytes being `num_bytes`; its calls."""
    calls = all_of(RunCall, engine.handle(StepSubmitted(0, num_items)))
    while engine.calls:
        call = next(iter(engine.calls.values())).command
        commands: list[Command] = []
        if isinstance(call, RunCall):
            node = engine.graph.nodes[call.node]
            items = [i * node.expands + k for i in items_of(call) for k in range(node.expands)]
            commands += engine.handle(
                ItemsProduced(call.call, call.lanes[0], tuple(items), num_bytes * len(items))
            )
        commands += engine.handle(CallFinished(call.call, call.lanes[0]))
        calls += all_of(RunCall, commands)
    assert not engine.failed
    assert not engine.steps
    return calls


@pytest.mark.parametrize("edge", [EdgePlan(max_items=2), EdgePlan(max_bytes=16)])
def test_an_edge_admits_no_more_than_it_holds(edge: EdgePlan) -> None:
    stages = {"a.score": StagePlan(chunk=1), "b.score": StagePlan(chunk=1)}
    plan = replace(APART, edges={"a.score->b.score": edge}, stages=stages)
    engine = Engine(CHAIN, plan)
    ahead = 0
    first = only(RunCall, engine.handle(StepSubmitted(0, 6)))
    while True:  # the producer alone goes on
        ahead += 1
        more = all_of(
            RunCall, engine.handle(ItemsProduced(first.call, first.lanes[0], (ahead - 1,), 8))
        )
        more += all_of(RunCall, engine.handle(CallFinished(first.call, 0)))
        here = [call for call in more if call.node == 0]
        if not here:
            break
        first = here[0]
    assert ahead == 2
    assert engine.calls  # the consumer works on the first item


@pytest.mark.parametrize("limit", [1, 8, 20])
def test_a_limit_in_bytes_lets_a_group_through(limit: int) -> None:
    """The stage behind the edge needs a whole group, however little room the limit leaves."""
    graph = graph_of(lambda a, b, x: normalise(b.score(a.sample(x))), "a", "b")
    plan = plan_of({"a": [0], "b": [1], "normalise": [2]})
    edges = {"b.score->normalise": EdgePlan(max_bytes=limit)}
    run_out(Engine(graph, replace(plan, edges=edges)))


def test_a_limit_in_bytes_lets_through_what_must_be_complete_first() -> None:
    graph = graph_of(lambda a, x: a.train(a.score(x)), "a")
    edges = {"a.score->a.train": EdgePlan(max_bytes=1)}
    calls = run_out(Engine(graph, replace(plan_of({"a": [0]}), edges=edges)))
    assert [call.node for call in calls][-2:] == [1, 1]


def test_a_chunk_that_no_edge_has_room_for_is_started_in_parts() -> None:
    plan = replace(APART, edges={"a.score->b.score": EdgePlan(max_items=2)})
    calls = run_out(Engine(CHAIN, plan))
    made = [items_of(call) for call in calls if call.node == 0]
    assert [item for items in made for item in items] == list(range(6))
    assert all(len(items) <= 2 for items in made)
