"""The engine told its events one by one: failures, deadlines, what comes twice, late or again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from m2flow.engine import Engine, StagePlan
from m2flow.engine.messages import (
    AbortCall,
    CallAborted,
    CallFailed,
    CallFinished,
    Command,
    CompleteStep,
    DropFolded,
    ExportWeights,
    FailRun,
    FeedCall,
    InstallWeights,
    ItemsProduced,
    LaneLost,
    LaneRestarted,
    MoveFailed,
    Part,
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.errors import UserError
from m2flow.flow import SOURCE
from tests.engine.toy_flows import (
    APART,
    CHAIN,
    STREAM,
    all_of,
    finish,
    graph_of,
    items_of,
    made,
    only,
    plan_of,
    streaming,
)

# --- failures -----------------------------------------------------------------------------------


def lines_of(commands: list[Command]) -> list[str]:
    assert len(commands) == 1
    return only(FailRun, commands).message.splitlines()


def assert_silent(engine: Engine) -> None:
    """A run that was stopped takes no more notice of anything."""
    assert engine.failed
    for event in (Tick(1e9), StepSubmitted(99, 4), LaneLost(0, "gone"), CallFinished(1, 0)):
        assert engine.handle(event) == []


def test_a_call_past_its_deadline_stops_the_run_and_says_who_waits_for_whom() -> None:
    engine = Engine(CHAIN, replace(APART, deadline_seconds=10.0))
    engine.handle(Tick(100.0))
    call = only(RunCall, engine.handle(StepSubmitted(3, 4)))
    assert engine.handle(Tick(109.9)) == []
    assert lines_of(engine.handle(Tick(110.0))) == [
        f"a.score (step 3, call {call.call}) has not finished within its deadline of 10 s",
        f"  running: a.score (step 3, call {call.call}) on lanes [0]",
        "  waiting: a.score (step 3): 0 of 4 items done, 0 ready, 4 leased",
        "  waiting: b.score (step 3): 0 of 4 items done, 0 ready, 0 leased",
    ]
    assert_silent(engine)


def test_each_call_has_a_deadline_of_its_own() -> None:
    engine = Engine(CHAIN, replace(APART, deadline_seconds=10.0))
    engine.handle(Tick(0.0))
    first = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    engine.handle(Tick(9.0))
    second = only(RunCall, finish(engine, first))
    assert engine.handle(Tick(18.9)) == []
    message = lines_of(engine.handle(Tick(19.0)))[0]
    assert message.startswith(f"b.score (step 0, call {second.call}) has not finished")


def test_a_driver_with_news_does_not_let_the_engine_judge() -> None:
    """A call that ended while nobody asked (a breakpoint, a long evaluation) has not hung."""
    engine = Engine(CHAIN, replace(APART, deadline_seconds=10.0))
    engine.handle(Tick(0.0))
    first = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    assert engine.handle(Tick(1000.0, judge=False)) == []
    second = only(RunCall, finish(engine, first))
    assert engine.handle(Tick(1000.0)) == []
    finish(engine, second)
    assert not engine.failed


@pytest.mark.parametrize("kind", ["finish", "export", "install"])
def test_every_kind_of_call_has_a_deadline_and_a_name(kind: str) -> None:
    graph = graph_of(lambda a, b, x: b.train(a.score(x)), "a", "b", publish=[("b", "a")])
    engine = Engine(graph, replace(APART, deadline_seconds=10.0))
    commands = engine.handle(StepSubmitted(0, 2))
    wanted = {"finish": RunFinish, "export": ExportWeights, "install": InstallWeights}[kind]
    while not all_of(wanted, commands):
        commands = finish(engine, next(iter(engine.calls.values())).command)
    words = {
        "finish": "b.train.finish (step 0, mini-batch 0)",
        "export": "export of b's weights (version 1)",
        "install": "install of b's weights in a (version 1)",
    }
    assert lines_of(engine.handle(Tick(10.0)))[0].startswith(f"{words[kind]} has not finished")


def test_a_call_that_failed_is_the_cause() -> None:
    engine = Engine(CHAIN, APART)
    call = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    error = ZeroDivisionError("by zero")
    commands = engine.handle(CallFailed(call.call, 0, error))
    assert lines_of(commands)[0] == f"a.score (step 0, call {call.call}) failed on lane 0"
    assert only(FailRun, commands).cause is error
    assert_silent(engine)


def test_a_move_that_failed_is_the_cause() -> None:
    engine = Engine(CHAIN, APART)
    engine.handle(StepSubmitted(0, 4))
    error = MemoryError("no room")
    commands = engine.handle(MoveFailed(1, "b", "onload", error))
    assert lines_of(commands)[0] == "onload of b failed on lane 1"
    assert only(FailRun, commands).cause is error
    assert_silent(engine)


def test_a_deadline_counts_from_the_last_sign_of_life() -> None:
    engine = Engine(STREAM, replace(streaming(max_running=1), deadline_seconds=10.0))
    engine.handle(Tick(0.0))
    first, second = all_of(RunCall, engine.handle(StepSubmitted(0, 8)))
    for now in (6.0, 12.0, 18.0):  # the second one has been silent for too long only at the end
        engine.handle(Tick(now, judge=False))
        item = next(iter(engine.calls[first.call].left))
        engine.handle(made(first, 2 * item, 2 * item + 1))
        if now == 6.0:
            engine.handle(made(second, 2))
    message = lines_of(engine.handle(Tick(18.0)))[0]
    assert message.startswith(f"a.sample (step 0, call {second.call}) has not finished")


@pytest.mark.parametrize("kind", [RunCall, RunFinish])
def test_a_method_that_says_so_makes_progress(kind: type[Any]) -> None:
    """A long `finish` ended the run: of calls that hand nothing on, none could put it off."""
    graph = graph_of(lambda a, b, x: b.train(a.score(x)), "a", "b")
    engine = Engine(graph, replace(APART, deadline_seconds=10.0))
    engine.handle(Tick(0.0))
    commands = engine.handle(StepSubmitted(0, 2))
    while not all_of(kind, commands):
        commands = finish(engine, next(iter(engine.calls.values())).command)
    (call,) = engine.calls.values()
    for now in (9.0, 18.0):
        engine.handle(Tick(now, judge=False))
        assert engine.handle(made(call.command)) == []
    assert engine.handle(Tick(27.9)) == []
    assert "has not finished" in lines_of(engine.handle(Tick(28.0)))[0]


def test_a_lost_lane_stops_the_run() -> None:
    engine = Engine(CHAIN, APART)
    call = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    commands = engine.handle(LaneLost(0, "killed by the kernel"))
    assert lines_of(commands)[0] == "lane 0 was lost: killed by the kernel"
    assert only(FailRun, commands).cause is None
    assert f"  running: a.score (step 0, call {call.call}) on lanes [0]" in lines_of(commands)
    assert_silent(engine)


def test_a_run_that_cannot_go_on_says_where_it_stands() -> None:
    graph = graph_of(lambda a, b, x: b.train(a.score(x)), "a", "b", publish=[("b", "a")])
    engine = Engine(graph, APART)
    lines = lines_of(engine.handle(StepSubmitted(2, 4)))  # its weights will never come
    assert lines == [
        "nothing runs and nothing can start",
        "  waiting: a.score (step 2): 0 of 4 items done, 4 ready, 0 leased",
        "  waiting: b.train (step 2): 0 of 4 items done, 0 ready, 0 leased",
    ]
    assert_silent(engine)


def test_a_step_that_cannot_be_cut_leaves_the_engine_as_it_was() -> None:
    engine = Engine(graph_of(lambda a, x: a.train(x), "a"), plan_of({"a": [0]}))
    with pytest.raises(UserError, match=r"a\.train: cannot cut 3 items .* into 2 mini-batches"):
        engine.handle(StepSubmitted(0, 3))
    assert not engine.steps
    assert all_of(RunCall, engine.handle(StepSubmitted(0, 4)))


def test_what_an_engine_may_not_be_told() -> None:
    engine = Engine(CHAIN, APART)
    call = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    with pytest.raises(IndexError):
        engine.handle(made(call, 7))
    with pytest.raises(AssertionError, match="step 0 was submitted twice"):
        engine.handle(StepSubmitted(0, 2))


# --- events that come twice or late, withdrawn calls, lanes that come back ----------------------


def test_a_failed_fetch_of_a_call_that_has_ended_changes_nothing() -> None:
    """The items it was fed with go to another call; that they could not be read is old news."""
    engine = Engine(STREAM, streaming(max_running=1))
    first, _ = all_of(RunCall, engine.handle(StepSubmitted(0, 3)))
    only(FeedCall, engine.handle(made(first, 0, 1)))
    only(RunCall, engine.handle(CallFinished(first.call, 0)))
    assert engine.handle(CallFailed(first.call, 0, OSError("no such payload"))) == []
    assert not engine.failed


def test_an_event_that_is_told_twice_changes_nothing() -> None:
    engine = Engine(CHAIN, APART)
    call = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    second = only(RunCall, engine.handle(made(call, 0, 1), made(call, 0, 1)))
    assert items_of(second) == (0, 1)
    assert engine.handle(made(call, 0, 1)) == []
    ended = CallFinished(call.call, 0)
    assert engine.handle(ended, ended) == [ReleaseItems(0, SOURCE, (0, 1), (0,))]
    assert engine.handle(made(call, 0, 1), ended) == []
    assert only(CompleteStep, finish(engine, second)).step == 0


HEALING = plan_of({"a": [0, 1], "b": [2]}, stages={"a.score": StagePlan(chunk=1)})


def test_the_units_of_a_lost_lane_are_pending_again_and_its_late_words_are_dropped() -> None:
    engine = Engine(CHAIN, HEALING, heal=True)
    first, second = all_of(RunCall, engine.handle(StepSubmitted(0, 2)))
    assert not all_of(RunCall, engine.handle(LaneLost(0, "gone")))
    assert engine.handle(made(first, 0), CallFinished(first.call, 0)) == []
    again = only(RunCall, finish(engine, second))
    assert (again.lanes, items_of(again)) == ((1,), (0,))
    assert engine.handle(LaneRestarted(0, 1), LaneLost(0, "gone")) == []
    fold = only(RunCall, finish(engine, again))
    assert (fold.lanes, items_of(fold)) == ((2,), (0, 1))
    assert only(CompleteStep, finish(engine, fold)).step == 0


def test_items_that_were_only_on_a_lost_lane_are_made_again() -> None:
    engine = Engine(CHAIN, plan_of({"a": [0, 1], "b": [2]}), heal=True)
    call = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    read = only(RunCall, finish(engine, call))
    assert read.inputs == (((Part(0, (0, 1), 0),),),)
    engine.handle(LaneLost(0, "gone"))
    again = only(RunCall, engine.handle(CallFailed(read.call, 2, OSError("lane 0 is gone"))))
    assert (again.node, again.lanes, items_of(again)) == (0, (1,), (0, 1))
    read = only(RunCall, finish(engine, again))
    assert read.inputs == (((Part(0, (0, 1), 1),),),)
    assert only(CompleteStep, finish(engine, read)).step == 0


def test_a_call_is_withdrawn_from_the_survivors_of_a_gang() -> None:
    graph = graph_of(lambda a, x: a.score(x), "a")
    engine = Engine(graph, plan_of({"a": [(0, 1)]}), heal=True)
    call = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    assert engine.handle(LaneLost(0, "gone")) == [AbortCall(call.call, (1,))]
    assert engine.handle(LaneRestarted(0, 1)) == [], "lane 1 is still at it"
    again = only(RunCall, engine.handle(CallAborted(call.call, 1)))
    assert again.call != call.call
    step = [ItemsProduced(again.call, 0, (0,), epoch=1), ItemsProduced(again.call, 1, (1,))]
    step += [CallFinished(again.call, 0, epoch=1), CallFinished(again.call, 1)]  # type: ignore[list-item]
    assert only(CompleteStep, engine.handle(*step)).step == 0


def test_what_a_streaming_call_has_handed_on_stays_when_it_is_withdrawn() -> None:
    engine = Engine(STREAM, plan_of({"a": [(0, 1)]}), heal=True)
    call = only(RunCall, engine.handle(StepSubmitted(0, 1)))
    engine.handle(made(call, 1))
    assert engine.handle(LaneLost(1, "gone")) == [AbortCall(call.call, (0,))]
    engine.handle(LaneRestarted(1, 1))
    again = only(RunCall, engine.handle(CallAborted(call.call, 0)))
    engine.handle(ItemsProduced(again.call, 0, (0, 1)))
    done = engine.handle(CallFinished(again.call, 0), CallFinished(again.call, 1, epoch=1))
    assert [item for part in only(CompleteStep, done).output for item in part.items] == [0, 1]


def test_what_cannot_be_made_again_stops_the_run() -> None:
    """Its mini-batch is over: to fold it in once more would count it twice."""
    graph = graph_of(lambda a, b, x: b.score(a.train(x)), "a", "b")
    plan = plan_of({"a": [0], "b": [1]}, stages={"b.score": StagePlan(chunk=4)})
    engine = Engine(graph, plan, heal=True)
    fold = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    finish(engine, only(RunFinish, finish(engine, fold)))
    (message, *_) = lines_of(engine.handle(LaneLost(0, "gone")))
    assert message == "items of a.train are gone and cannot be made again: they have been folded in"


def test_a_lane_that_does_not_come_back_stops_a_run_that_heals() -> None:
    engine = Engine(CHAIN, HEALING, heal=True)
    engine.handle(StepSubmitted(0, 2))
    (message, *_) = lines_of(engine.handle(LaneLost(0, "killed", comes_back=False)))
    assert message == "lane 0 was lost: killed"


@pytest.mark.parametrize("begun", [True, False])
def test_what_was_folded_in_is_dropped_unless_a_call_had_not_begun(begun: bool) -> None:
    graph = graph_of(lambda a, b, x: b.train(a.score(x)), "a", "b")
    chunks = {"a.score": StagePlan(chunk=1), "b.train": StagePlan(chunk=1)}
    engine = Engine(graph, plan_of({"a": [0, 1], "b": [2]}, stages=chunks), heal=True)
    first, second = all_of(RunCall, engine.handle(StepSubmitted(0, 4)))
    fold, _ = sorted(all_of(RunCall, finish(engine, first)), key=lambda call: -call.node)
    finish(engine, fold)
    read, _ = sorted(all_of(RunCall, finish(engine, second)), key=lambda call: -call.node)
    engine.handle(LaneLost(1, "gone"))
    failed = CallFailed(read.call, 2, OSError("lane 1 is gone"), begun=begun)
    dropped = all_of(DropFolded, engine.handle(failed))
    assert dropped == ([DropFolded(read.node, 0, (2,))] if begun else [])


def test_which_weights_a_lane_is_to_have() -> None:
    """Those that it had; none where newer ones are asked for."""
    graph = graph_of(lambda a, b, x: b.train(a.score(x)), "a", "b", publish=[("b", "a")])
    engine = Engine(graph, plan_of({"a": [0], "b": [1]}), first_step=5, heal=True)
    call = only(RunCall, engine.handle(StepSubmitted(5, 2)))
    assert engine.weights_on(0) == {("b", "a"): 5}
    assert engine.weights_on(1) == {}
    fold = only(RunCall, finish(engine, call))
    for _ in range(2):  # mini-batches
        commands = finish(engine, only(RunFinish, finish(engine, fold)))
        fold = next(iter(all_of(RunCall, commands)), fold)
    export = only(ExportWeights, commands)
    engine.handle(LaneLost(0, "gone"))
    assert engine.weights_on(0) == {("b", "a"): 5}
    assert all_of(InstallWeights, engine.handle(CallFinished(export.call, 1))) == []
    assert engine.weights_on(0) == {("b", "a"): None}
    install = only(InstallWeights, engine.handle(LaneRestarted(0, 1)))
    assert install.version == 6
    engine.handle(CallFinished(install.call, 0, epoch=1))
    assert engine.weights_on(0) == {("b", "a"): 6}
