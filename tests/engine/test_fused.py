"""Loops that go around on one lane, loops that cannot, and loops with no way out."""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Generator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import m2flow
from m2flow import Batch, Flow, Stream, Worker, loop, stage
from m2flow.engine import Engine, LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.loops import fused_loops
from m2flow.engine.messages import (
    LAUNCHER,
    CallFinished,
    CompleteStep,
    FailRun,
    ItemsProduced,
    LaneLost,
    LaneRestarted,
    MoveState,
    Part,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.engine.spans import ids_of
from m2flow.errors import FlowError, UserError
from m2flow.flow import SOURCE, FlowGraph
from m2flow.runtime.lane.host import LaneHost
from tests.engine.toy_flows import all_of, finish, graph_of, items_of, only, plan_of

LOOP = graph_of(lambda a, b, c, x: c.score(loop(a.score, b.act)(x)), "a", "b", "c")


def fused(graph: FlowGraph, plan: Plan) -> bool:
    return bool(fused_loops(graph, plan))


def test_which_loops_run_fused() -> None:
    together = plan_of({"a": [0, 1], "b": [1, 0], "c": [2]})
    assert fused(LOOP, together)
    assert not fused(LOOP, replace(together, fuse_loops=False))
    assert not fused(LOOP, plan_of({"a": [0, 1], "b": [0], "c": [2]}))
    assert not fused(LOOP, plan_of({"a": [(0, 1)], "b": [(0, 1)], "c": [2]}))


def test_a_loop_is_fused_only_if_its_members_fit_together() -> None:
    lanes = {"a": [0], "b": [0], "c": [0]}
    assert fused(LOOP, plan_of(lanes, memory=20, state_bytes=10))
    assert not fused(LOOP, plan_of(lanes, memory=19, state_bytes=10))


def test_a_loop_whose_members_bind_items_apart_is_not_fused() -> None:
    graph = graph_of(lambda a, b, x: loop(a.act, b.act)(x), "a", "b")
    assert not fused(graph, plan_of({"a": [0], "b": [0]}))
    graph = graph_of(lambda a, x: loop(a.act, a.score)(x), "a")
    assert fused(graph, plan_of({"a": [0]}))


def test_a_fused_call_holds_its_items_until_they_leave() -> None:
    plan = plan_of(
        {"a": [0, 1], "b": [0, 1], "c": [2]},
        stages={"a.score": StagePlan(chunk=3), "c.score": StagePlan(chunk=1)},
    )
    engine = Engine(LOOP, plan)
    first, second = all_of(RunCall, engine.handle(StepSubmitted(0, 5)))
    assert first.fused
    assert (items_of(first), items_of(second)) == ((0, 1, 2), (3, 4))  # no more will come
    out = only(RunCall, engine.handle(ItemsProduced(first.call, first.lanes[0], (1,), 0, (1,))))
    assert (out.node, items_of(out)) == (2, (1,))
    assert not all_of(
        RunCall, engine.handle(ItemsProduced(first.call, first.lanes[0], (0, 2), 0, (0, 2)))
    )
    engine.handle(CallFinished(first.call, 0))
    commands = engine.handle(ItemsProduced(second.call, second.lanes[0], (3, 4), 0, (3, 4)))
    commands += engine.handle(CallFinished(second.call, 1))
    while engine.calls:
        commands += finish(engine, next(iter(engine.calls.values())).command)
    assert only(CompleteStep, commands).step == 0


@pytest.mark.parametrize(
    ("first", "waiting", "group"), [(None, None, None), (4, None, 4), (None, 2, 2), (1, 2, 1)]
)
def test_a_fused_call_is_told_into_which_groups_its_items_are_dealt(
    first: int | None, waiting: int | None, group: int | None
) -> None:
    graph = graph_of(lambda a, b, x: loop(a.score, b.pause)(x), "a", "b")
    stages = {"a.score": StagePlan(chunk=first), "b.pause": StagePlan(chunk=waiting)}
    engine = Engine(graph, plan_of({"a": [0], "b": [0]}, stages=stages))
    command = only(RunCall, engine.handle(StepSubmitted(0, 4)))
    assert (command.group, items_of(command)) == (group, tuple(range(first or 4)))


def test_where_no_stage_waits_there_are_no_groups() -> None:
    plan = plan_of({"a": [0], "b": [0], "c": [0]}, stages={"b.act": StagePlan(chunk=1)})
    assert only(RunCall, Engine(LOOP, plan).handle(StepSubmitted(0, 4))).group is None


def test_all_members_of_a_fused_loop_are_resident() -> None:
    engine = Engine(LOOP, plan_of({"a": [0], "b": [0], "c": [0]}, memory=20, state_bytes=10))
    commands = engine.handle(StepSubmitted(0, 1))
    assert [move.worker for move in all_of(MoveState, commands)] == ["a", "b"]


def test_a_fused_loop_waits_for_the_weights_of_any_member() -> None:
    graph = graph_of(
        lambda a, b, c, x: c.log(loop(a.score, b.act)(x)), "a", "b", "c", publish=[("c", "b")]
    )
    engine = Engine(graph, plan_of({"a": [0], "b": [0], "c": [1]}))
    assert only(FailRun, engine.handle(StepSubmitted(1, 1))).message.startswith("nothing runs")


def test_what_a_fused_loop_is_done_with_is_not_begun_again() -> None:
    """Simulators were begun anew for rollouts that were over, and kept until the run's end."""
    graph = graph_of(lambda a, b, c, x: c.train(loop(b.score, a.act)(a.act(x))), "a", "b", "c")
    engine = Engine(graph, plan_of({"a": [0], "b": [0], "c": [1]}), heal=True)
    engine.handle(StepSubmitted(0, 2))
    last_finish = 1
    while True:
        command = next(iter(engine.calls.values())).command
        if isinstance(command, RunFinish) and command.minibatch == last_finish:
            break
        finish(engine, command, leaving=range(2) if getattr(command, "fused", False) else ())
    assert not all_of(RunCall, engine.handle(LaneLost(0, "gone")))
    assert not all_of(RunCall, engine.handle(LaneRestarted(0, 1)))


# --- on a lane ----------------------------------------------------------------------------------


class Counter(Worker):
    """Counts down; what a column is called, and where it stands, is up to the test."""

    def __init__(self, column: str = "done", extra: bool = False) -> None:
        self.column, self.extra, self.calls = column, extra, 0

    @stage
    def down(self, batch: Batch) -> Batch:
        self.calls += 1
        left = [x - 1 for x in batch["x"]]
        return batch.with_columns(x=left, **{self.column: [x <= 0 for x in left]})

    @stage
    def note(self, batch: Batch) -> Batch:
        turns = [n + 1 for n in batch["turns"]] if "turns" in batch else [1] * len(batch)
        return batch.with_columns(turns=turns) if self.extra else batch


class Counting(Flow):
    counter: Counter
    max_turns: int | None = None
    then: bool = False

    def step(self, items: Stream) -> Stream:
        items = loop(self.counter.down, self.counter.note, max_turns=self.max_turns)(items)
        return tidy(items) if self.then else items


@stage
def tidy(batch: Batch) -> Batch:
    return batch


def run(flow: Flow, **more: Any) -> m2flow.runtime.driver.runner.StepResult:
    placements = {worker: Placement(((0,),)) for worker in flow.trace().workers}
    plan = Plan("eager", (LaneSpec(0),), placements, **more)
    with m2flow.launch(flow, items_per_step=4, plan=plan) as started:
        return started.step(Batch({"x": [3, 1, 5, 2]}))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("max_turns", [None, 2, 9])
def test_fused_or_not_the_result_is_the_same(fuse: bool, max_turns: int | None) -> None:
    flow = Counting(counter=Counter(), max_turns=max_turns, then=True)
    result = run(flow, fuse_loops=fuse)
    turns = [min(x, max_turns or 99) for x in (3, 1, 5, 2)]
    assert result.output["x"] == [x - n for x, n in zip((3, 1, 5, 2), turns, strict=True)]
    assert flow.counter.calls == max(turns)
    spans = [span for span in result.spans if span.name == "counter.down"]
    assert [span.args["items"] for span in spans] == [
        sum(n > turn for n in turns) for turn in range(max(turns))
    ]
    assert all(earlier.end <= later.start for earlier, later in pairwise(spans))


class Asked(Worker):
    """Counts down; it waits for that, but not where an item is in its last turn."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @stage
    def look(self, batch: Batch) -> Batch:
        self.said.append(f"look {batch.ids}")
        return batch

    @stage(waits=True)
    def ask(self, batch: Batch) -> Generator[None, None, Batch]:
        if "mind" in batch:
            raise UserError("is taken")
        self.said.append(f"ask {batch.ids}")
        if min(batch["x"]) > 1:
            yield
        self.said.append(f"told {batch.ids}")
        left = [x - 1 for x in batch["x"]]
        return batch.with_columns(x=left, done=[x <= 0 for x in left])


class Asking(Flow):
    asked: Asked

    def step(self, items: Stream) -> Stream:
        return loop(self.asked.look, self.asked.ask)(items)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("chunk", [None, 2, 1])
def test_a_stage_that_waits_gives_the_same_in_any_groups(fuse: bool, chunk: int | None) -> None:
    flow = Asking(asked=Asked())
    result = run(flow, fuse_loops=fuse, stages={"asked.ask": StagePlan(chunk=chunk)})
    assert result.output["x"] == [0] * 4
    spans = [span for span in result.spans if span.name == "asked.ask"]
    turns = Counted(item for span in spans for item in ids_of(str(span.args["ids"])))
    assert turns == {0: 3, 1: 1, 2: 5, 3: 2}


def test_groups_take_turns_while_a_stage_waits() -> None:
    flow = Asking(asked=Asked())
    host = LaneHost(0, {"step": flow.trace()}, {"asked": flow.asked})
    host.store.put("step", 0, SOURCE, Batch({"x": [2, 3, 2, 2]}))
    parts = ((Part(SOURCE, (0, 1, 2, 3), LAUNCHER),),)
    call = RunCall(1, 0, 0, (0,), (parts,), fused=True, group=2)
    pieces = list(host.call("step", call))
    a, b = "(0, 2)", "(1, 3)"
    assert flow.asked.said == [
        f"look {a}", f"ask {a}", f"look {b}", f"ask {b}",
        f"told {a}", f"look {a}", f"ask {a}", f"told {a}",  # which has nothing to wait for
        f"told {b}", f"look {b}", f"ask {b}", f"told {b}", "look (1,)", "ask (1,)", "told (1,)",
    ]  # fmt: skip
    gone = [piece.items for piece in pieces if piece is not None]
    assert gone == [(0, 2), (3,), (1,)]
    report = host.finished("step", call, 0.0)
    asked = [span.args for span in report.spans if span.name == "asked.ask"]
    assert [args["groups"] for args in asked] == [2] * 5
    assert all(args["busy"] >= 0 for args in asked)


def test_what_is_wrong_in_a_stage_that_waits_is_said_of_it() -> None:
    plan = Plan("eager", (LaneSpec(0),), {"asked": Placement(((0,),))})
    flow, taken = Asking(asked=Asked()), pytest.raises(UserError, match=r"asked\.ask: is taken")
    with m2flow.launch(flow, items_per_step=1, plan=plan) as started, taken:
        started.step(Batch({"x": [1], "mind": [0]}))


def test_called_with_a_batch_a_stage_that_waits_is_waited_for() -> None:
    assert Asked().ask(Batch({"x": [3]}))["x"] == [2]


def test_a_long_loop_stops_between_turns_and_gives_signs_of_life() -> None:
    """Its deadline counts from the last one, and its first item may leave after an hour."""
    graph = Counting(counter=Counter()).trace()
    host = LaneHost(0, {"step": graph}, {"counter": Counter()})
    host.store.put("step", 0, SOURCE, Batch({"x": [9]}))
    call = RunCall(1, 0, 0, (0,), (((Part(SOURCE, (0,), LAUNCHER),),),), fused=True)
    pieces = list(host.call("step", call))
    assert [piece.items if piece else None for piece in pieces] == [None] * 8 + [(0,), None]
    engine = Engine(graph, replace(plan_of({"counter": [0]}), deadline_seconds=10.0))
    engine.handle(Tick(0.0))
    engine.handle(StepSubmitted(0, 1))
    for turn, piece in enumerate(pieces):
        engine.handle(Tick(9.0 * turn))
        assert not engine.failed
        engine.handle(piece or ItemsProduced(1, 0, ()))
    commands = engine.handle(CallFinished(1, 0))
    assert only(CompleteStep, commands).step == 0


@pytest.mark.parametrize("fuse", [True, False])
def test_a_loop_whose_exit_never_appears_is_named(fuse: bool) -> None:
    with pytest.raises(FlowError, match=r"loop\(counter\.down, counter\.note\): .*column 'done'"):
        run(Counting(counter=Counter(column="finished")), fuse_loops=fuse)
    output = run(Counting(counter=Counter(column="finished"), max_turns=2), fuse_loops=fuse).output
    assert output["x"] == [1, -1, 3, 0]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_items_that_leave_a_loop_with_different_columns_are_an_error_of_it(
    fuse: bool, then: bool
) -> None:
    """One leaves before it was noted for the first time."""
    with pytest.raises(UserError, match=r"loop\(counter\.down, counter\.note\).*'turns'"):
        run(Counting(counter=Counter(extra=True), then=then), fuse_loops=fuse)
