"""The engine told its events one by one: failures, deadlines, feeding, and the order of things."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from m2flow.engine import EdgePlan, Engine, LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.messages import (
    LAUNCHER,
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
    MoveState,
    Part,
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.errors import PlanError, UserError
from m2flow.flow import SOURCE, Flow, FlowGraph, Worker, loop, stage

T = TypeVar("T")
Lanes = Mapping[str, Iterable[Any]]


def nothing(*batches: Any) -> Any:
    """What the stages of these tests would do."""


class Model(Worker):
    """Stages of every kind; none of them is ever called."""

    @stage(streaming=True)
    def roll(self, b: Any) -> Any: ...

    @stage(streaming=True, expands=2)
    def sample(self, b: Any) -> Any: ...

    @stage
    def score(self, b: Any) -> Any: ...

    @stage(sticky=True)
    def act(self, b: Any) -> Any: ...

    @stage(waits=True)
    def pause(self, b: Any) -> Any:
        yield

    @stage(accumulates=True)
    def log(self, b: Any) -> Any: ...

    @stage(accumulates=True, minibatches=2)
    def train(self, b: Any) -> Any: ...

    @train.finish
    def train_finish(self) -> dict[str, float]: ...


@stage(unit="group")
def normalise(b: Any) -> Any: ...


def graph_of(
    step: Callable[..., Any], *workers: str, publish: Iterable[tuple[str, str]] = ()
) -> FlowGraph:
    """The graph of a flow with these workers and weight edges; `step` takes them and the stream."""
    made = {name: Model() for name in workers}

    def sync(self: Flow) -> None:
        for source, target in publish:
            made[source].publish(made[target])

    body = {
        "__annotations__": dict.fromkeys(workers, Model),
        "step": lambda self, x: step(*made.values(), x),
        "sync": sync,
    }
    return type("Toy", (Flow,), body)(**made).trace()


def plan_of(
    lanes: Mapping[str, Iterable[int | tuple[int, ...]]], memory: int | None = None, **more: Any
) -> Plan:
    """A plan from worker to the lanes (or gangs) of its replicas."""
    replicas = {
        worker: tuple((spot,) if isinstance(spot, int) else spot for spot in spots)
        for worker, spots in lanes.items()
    }
    used = sorted({lane for gangs in replicas.values() for gang in gangs for lane in gang})
    state = more.pop("state_bytes", 0)
    placements = {worker: Placement(gangs, state) for worker, gangs in replicas.items()}
    specs = tuple(LaneSpec(lane, memory_bytes=memory) for lane in used)
    return Plan("custom", specs, placements, **more)


def only(kind: type[T], commands: Iterable[Command]) -> T:
    """The one command of this kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__}"
    return found[0]


def all_of(kind: type[T], commands: Iterable[Command]) -> list[T]:
    return [command for command in commands if isinstance(command, kind)]


def items_of(command: Any, lane: int = 0) -> tuple[int, ...]:
    """Items of a call's first input, on the lane in this place of its gang."""
    return tuple(sorted(item for part in command.inputs[lane][0] for item in part.items))


def made(call: RunCall, *items: int) -> ItemsProduced:
    """The first lane of a call has made items."""
    return ItemsProduced(call.call, call.lanes[0], items)


def finish(
    engine: Engine, call: Any, leaving: Iterable[int] = (), expands: int = 1
) -> list[Command]:
    """All lanes of a call produce everything and finish; the commands that follow."""
    commands: list[Command] = []
    for place, lane in enumerate(call.lanes):
        if isinstance(call, RunCall):
            items = [i * expands + k for i in items_of(call, place) for k in range(expands)]
            gone = tuple(item for item in items if item in leaving)
            commands += engine.handle(ItemsProduced(call.call, lane, tuple(items), 0, gone))
        commands += engine.handle(CallFinished(call.call, lane))
    return commands


CHAIN = graph_of(lambda a, b, x: b.score(a.score(x)), "a", "b")
APART = plan_of({"a": [0], "b": [1]})


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


# --- streaming calls ----------------------------------------------------------------------------

STREAM = graph_of(lambda a, x: a.sample(x), "a")


def streaming(**stages: Any) -> Plan:
    return plan_of({"a": [0, 1]}, stages={"a.sample": StagePlan(**stages)})


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


# --- mini-batches, weights and the order of steps -----------------------------------------------


def test_mini_batches_are_made_by_item_and_not_by_arrival() -> None:
    graph = graph_of(lambda a, b, x: b.train(a.roll(x)), "a", "b")
    engine = Engine(graph, replace(APART, stages={"b.train": StagePlan(chunk=1)}))
    roll = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    assert engine.handle(made(roll, 3))  # of the second mini-batch: only released
    assert not all_of(RunCall, engine.handle(made(roll, 2)))
    fold = only(RunCall, engine.handle(made(roll, 1)))
    assert items_of(fold) == (1,)
    assert not all_of(RunCall, finish(engine, fold))
    fold = only(RunCall, engine.handle(made(roll, 0)))
    done = only(RunFinish, finish(engine, fold))
    assert done.minibatch == 0
    assert items_of(only(RunCall, finish(engine, done))) == (2,)


def test_a_step_is_not_folded_in_before_the_one_before_is_finished() -> None:
    """Items of two steps would end in one gradient."""
    graph = graph_of(lambda a, b, x: b.train(a.roll(x)), "a", "b")
    plan = plan_of({"a": [0, 1], "b": [2]}, stages={"a.roll": StagePlan(chunk=4)}, max_staleness=1)
    engine = Engine(graph, plan)
    slow = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    quick = only(RunCall, engine.handle(StepSubmitted(1, 4)))
    assert not all_of(RunCall, finish(engine, quick))
    fold = only(RunCall, finish(engine, slow))
    assert (fold.step, items_of(fold)) == (0, (0, 1))
    steps = [(fold.step, items_of(fold))]
    commands = finish(engine, fold)
    while engine.calls:
        call = next(iter(engine.calls.values())).command
        if isinstance(call, RunCall):
            steps.append((call.step, items_of(call)))
        commands += finish(engine, call)
    assert steps == [(0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3))]
    assert [done.step for done in all_of(CompleteStep, commands)] == [0, 1]


def test_what_reads_the_weights_is_done_before_they_change() -> None:
    """Log-probabilities of the second mini-batch are those of the start of the step."""
    graph = graph_of(lambda a, b, x: b.train(b.score(a.roll(x))), "a", "b")
    plan = replace(
        APART,
        stages={"b.score": StagePlan(chunk=1), "b.train": StagePlan(chunk=1)},
        order=("b.train", "b.score"),
    )
    engine = Engine(graph, plan)
    roll = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    started: list[Any] = []
    commands: list[Command] = []
    for item in (0, 1, 2, 3):
        commands += engine.handle(made(roll, item))
        while calls := [c.command for c in engine.calls.values() if c.command.lanes == (1,)]:
            started.append(calls[0])
            commands += finish(engine, calls[0])
    finishes = [n for n, call in enumerate(started) if isinstance(call, RunFinish)]
    scores = [n for n, call in enumerate(started) if getattr(call, "node", 9) == 1]
    assert len(finishes) == 2
    assert len(scores) == 4
    assert max(scores) < min(finishes)


def test_a_stage_after_training_waits_for_all_of_it() -> None:
    graph = graph_of(lambda a, x: a.score(a.train(x)), "a")
    stages = {name: StagePlan(chunk=1) for name in ("a.train", "a.score")}
    engine = Engine(graph, plan_of({"a": [0]}, stages=stages, order=("a.score", "a.train")))
    commands = engine.handle(StepSubmitted(0, 4))
    order = []
    while engine.calls:
        call = next(iter(engine.calls.values())).command
        order.append("finish" if isinstance(call, RunFinish) else ("train", "score")[call.node])
        commands += finish(engine, call)
    half = ["train", "train", "finish"]
    assert order == [*half, *half, *["score"] * 4]


def test_weights_go_out_when_those_who_run_on_them_have_done_the_step() -> None:
    """Or part of a step would run on the weights of the next one."""

    def step(a: Model, b: Model, x: Any) -> Any:
        x = a.score(x)
        b.log(x)
        return a.score(x)

    graph = graph_of(step, "a", "b", publish=[("b", "a")])
    engine = Engine(graph, APART)
    first = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    log, second = finish(engine, first)[-2:]
    second, log = sorted((c.command for c in engine.calls.values()), key=lambda c: c.lanes)
    assert not all_of(ExportWeights, finish(engine, log))
    export = only(ExportWeights, finish(engine, second))
    install = only(InstallWeights, finish(engine, export))
    done = only(CompleteStep, finish(engine, install))
    assert dict(done.staleness) == {0: 4}


def test_weights_beside_their_source_are_taken_before_it_learns_on() -> None:
    """They were asked for when the export for other lanes had ended; the next step was first."""
    graph = graph_of(lambda a, b, x: b.train(a.score(x)), "a", "b", publish=[("b", "a")])
    engine = Engine(graph, plan_of({"a": [1, 2], "b": [0, 1]}, max_staleness=1))
    commands = [*engine.handle(StepSubmitted(0, 2)), *engine.handle(StepSubmitted(1, 2))]
    while engine.calls:
        running = [call.command for call in engine.calls.values()]
        commands += finish(engine, min(running, key=lambda one: isinstance(one, ExportWeights)))
    install = next(one for one in all_of(InstallWeights, commands) if one.local)
    assert (install.version, install.lanes) == (1, (1,))
    learnt = all_of(RunFinish, commands[: commands.index(install)])
    assert [one.step for one in learnt] == [0, 0], "weights of version 1, and nothing of step 1"


def test_versions_go_out_in_the_order_of_steps() -> None:
    graph = graph_of(lambda a, b, x: b.log(a.roll(x)), "a", "b", publish=[("b", "a")])
    plan = plan_of({"a": [0, 1], "b": [2, 3]}, max_staleness=1)
    engine = Engine(graph, replace(plan, stages={"a.roll": StagePlan(chunk=2)}))
    slow = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    quick = only(RunCall, engine.handle(StepSubmitted(1, 2)))
    commands = finish(engine, quick)
    assert not all_of(RunCall, commands)  # the learner takes its steps in order
    commands += finish(engine, slow)
    while engine.calls:
        commands += finish(engine, next(iter(engine.calls.values())).command)
    versions = [(c.version, c.lanes) for c in all_of(InstallWeights, commands)]
    assert versions == [(1, (0,)), (1, (1,)), (2, (0,)), (2, (1,))]
    done = all_of(CompleteStep, commands)
    assert [dict(step.staleness) for step in done] == [{0: 2}, {1: 2}]


def test_a_step_that_overtakes_another_is_complete_after_it() -> None:
    engine = Engine(graph_of(lambda a, x: a.score(x), "a"), plan_of({"a": [0, 1]}, max_staleness=1))
    slow = only(RunCall, engine.handle(StepSubmitted(0, 2)))
    quick = only(RunCall, engine.handle(StepSubmitted(1, 2)))
    assert not all_of(CompleteStep, finish(engine, quick))
    assert [done.step for done in all_of(CompleteStep, finish(engine, slow))] == [0, 1]


def test_a_target_of_two_sources_waits_for_both() -> None:
    def step(a: Model, b: Model, c: Model, x: Any) -> Any:
        x = a.score(x)
        b.log(x)
        return c.log(x)

    graph = graph_of(step, "a", "b", "c", publish=[("b", "a"), ("c", "a")])
    engine = Engine(graph, plan_of({"a": [0, 1], "b": [2], "c": [3]}))
    finish(engine, only(RunCall, engine.handle(StepSubmitted(0, 2))))
    commands: list[Command] = []
    for lane in (2, 3):
        log = next(c.command for c in engine.calls.values() if c.command.lanes == (lane,))
        commands += finish(engine, log)
    for export in all_of(ExportWeights, commands):
        commands += finish(engine, export)
    installs = all_of(InstallWeights, commands)
    engine.handle(StepSubmitted(1, 2))
    while len(engine.calls) > 1 or not engine.failed:
        here = [c.command for c in engine.calls.values()]
        assert not all_of(RunCall, here) or len(installs) == 4
        if all_of(RunCall, here):
            break
        more = finish(engine, here[0])
        installs += all_of(InstallWeights, more)
    assert {(i.source, i.lanes) for i in installs} == {
        ("b", (0,)), ("b", (1,)), ("c", (0,)), ("c", (1,)),
    }  # fmt: skip


def test_weights_are_exported_only_if_a_target_stands_elsewhere() -> None:
    graph = graph_of(lambda a, b, x: b.log(a.score(x)), "a", "b", publish=[("b", "a")])
    engine = Engine(graph, plan_of({"a": [0], "b": [0]}))
    commands = engine.handle(StepSubmitted(0, 1))
    for _ in range(3):
        commands += finish(engine, next(iter(engine.calls.values())).command)
    assert not all_of(ExportWeights, commands)
    assert only(InstallWeights, commands).local
    assert only(CompleteStep, commands).version == 1


# --- lanes --------------------------------------------------------------------------------------


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
