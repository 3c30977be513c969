"""The engine told its events one by one: mini-batches, weights, and the order of steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from m2flow.engine import Engine, StagePlan
from m2flow.engine.messages import (
    Command,
    CompleteStep,
    ExportWeights,
    InstallWeights,
    RunCall,
    RunFinish,
    StepSubmitted,
)
from tests.engine.toy_flows import (
    APART,
    Model,
    all_of,
    finish,
    graph_of,
    items_of,
    made,
    only,
    plan_of,
)


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
