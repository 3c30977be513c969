"""Runs in which anything is lost at any time end right, or say why not: hundreds of schedules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow.engine import Engine
from m2flow.engine.messages import InstallWeights
from m2flow.engine.plan import LaneSpec, StagePlan
from m2flow.errors import RunFailed
from m2flow.flow import SOURCE
from m2flow.runtime.driver import loading, moving
from m2flow.runtime.driver.carrier import RayCarrier
from m2flow.runtime.driver.recovery import Recovery
from m2flow.runtime.driver.runner import Runner
from m2flow.runtime.driver.supervision import Supervision
from tests.engine.random_cases import Case, cases
from tests.engine.toy_flows import graph_of, plan_of
from tests.runtime.crash_schedules import (
    SCHEDULES,
    CrashSchedule,
    Stateful,
    Stateless,
    shortest,
)
from tests.runtime.virtual_pool import VirtualProcesses, launched, virtual_time
from tests.runtime.virtual_world import Faults

ordinary = settings(
    deadline=None, suppress_health_check=tuple(HealthCheck), report_multiple_bugs=False
)


@given(cases(), st.integers(0, 2**32))
@settings(ordinary, max_examples=100)
def test_a_run_that_loses_nothing_does_all_of_its_steps(case: Case, seed: int) -> None:
    assert CrashSchedule(case, SCHEDULES[0], seed).run() is None


@given(cases(), st.integers(0, 2**32), st.sampled_from(SCHEDULES[1:]))
@settings(ordinary, max_examples=200)
def test_a_run_goes_on_or_says_why_not(case: Case, seed: int, faults: Faults) -> None:
    CrashSchedule(case, faults, seed).run()


CASE = Case(
    graph_of(lambda a, b, x: b.train(a.score(x)), "a", "b", publish=[("b", "a")]),
    plan_of({"a": [0], "b": [1]}, max_staleness=1),
    num_items=4,
    num_steps=6,
    seed=0,
)


def no_step_is_taken_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recovery, "since_snapshot", lambda self: ([], self._batches[-1:]))


def old_weights_are_not_installed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "weights_on", lambda *_: {})


def nobody_learns_of_a_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RayCarrier, "_lane_ended", lambda *_: [])


def states_are_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recovery, "keep", lambda self, _, seconds: KEEP(self, {}, seconds))


KEEP = Recovery.keep


def machines_are_taken_for_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VirtualProcesses, "without_machine", lambda _, lanes: set(lanes))


def lanes_are_given_up_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Supervision, "_most", property(lambda _: 0, lambda *_: None), raising=False)


@pytest.mark.parametrize(
    ("break_it", "elastic"),
    [
        (no_step_is_taken_again, False),
        (old_weights_are_not_installed, False),
        (nobody_learns_of_a_loss, False),
        (states_are_not_restored, False),
        (machines_are_taken_for_gone, False),
        (machines_are_taken_for_gone, True),
        (lanes_are_given_up_at_once, False),
        (lanes_are_given_up_at_once, True),
    ],
)
def test_a_driver_that_is_broken_is_found_out(
    break_it: Callable[[pytest.MonkeyPatch], None], elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play() -> None:
        for seed in range(20):
            CrashSchedule(CASE, Faults(lose=0.03, most=8, elastic=elastic), seed).run()

    play()
    break_it(monkeypatch)
    with pytest.raises((AssertionError, RunFailed)):
        play()


def test_a_schedule_that_is_broken_is_cut_to_what_breaks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states_are_not_restored(monkeypatch)
    everything = replace(SCHEDULES[-1], lose=0.05, most=8)
    faults, seed = shortest(CASE, everything, 7)
    assert replace(faults, most=1) == Faults(lose=0.05, most=1)
    assert faults.most <= 2
    for _ in range(2):  # it is a reproducer
        with pytest.raises((AssertionError, RunFailed)):
            CrashSchedule(CASE, faults, seed).run()


PLAYED = """
from tests.runtime.crash_schedules import SCHEDULES, CrashSchedule
from tests.runtime.test_crash_schedules import CASE, REPLICAS
for seed in range(20):
    for case in (CASE, REPLICAS):
        for faults in SCHEDULES:
            played = CrashSchedule(case, faults, seed)
            reason, world = played.run(), played.world
            print(seed, reason, played.steps, world.now, sorted(world.events.items()))
"""


def test_a_seed_is_the_same_schedule_in_any_process() -> None:
    root = Path(__file__).parents[2]
    told = [
        subprocess.run(
            [sys.executable, "-c", PLAYED],
            env={**os.environ, "PYTHONHASHSEED": str(number), "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for number in (1, 2)
    ]
    assert told[0] == told[1]
    assert "lanes lost" in told[0]


def test_a_lane_that_is_lost_again_while_it_takes_its_weights_over_comes_back() -> None:
    """It was waited for until the deadline: its first process had been asked for them, too."""
    for seed in range(200):
        CrashSchedule(CASE, Faults(lose=0.03, most=8), seed).run()


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ({"a": [0, 1], "b": [0]}, {"a": [0, 1], "b": [1]}, {1}),
        ({"a": [0], "b": [1]}, {"a": [0, 1], "b": [1]}, {0, 1}),
    ],
    ids=["the learner has left the other", "the other comes back alone"],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_lane_is_lost_while_a_run_goes_over_to_another_plan(
    before: dict[str, list[int]],
    after: dict[str, list[int]],
    lost: set[int],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lane that had dropped the learner was asked to save it. And where another lane was lost as
    well, and came back alone, the run waited for the first one until the deadline."""
    monkeypatch.setattr(Recovery, "is_due", lambda *_: False)
    plan, loaded = plan_of(before), loading._loaded
    graph = graph_of(lambda a, b, x: b.train(a.score(x)), "a", "b")
    world = CrashSchedule(replace(CASE, graph=graph, plan=plan), Faults(), seed).world
    batches = [world.batch(SOURCE, step, range(4)) for step in range(4)]

    def lose(*given: Any) -> Any:
        monkeypatch.setattr(loading, "_loaded", loaded)
        for lane in lost:
            world.lanes[lane].die("killed")
        return loaded(*given)

    with virtual_time(world):
        lanes = tuple(map(LaneSpec, (0, 1)))
        workers = {"a": Stateless(), "b": Stateful()}
        run = launched(world, lanes, plan, workers, 0, 8, None)
        given = [result.step for result in run.steps(batches[:2])]
        monkeypatch.setattr(loading, "_loaded", lose)
        run._lasting(lambda: run.replan(plan_of(after)))
        given += [result.step for result in run.steps(batches[2:])]
    assert given == [0, 1, 2, 3]
    assert {loss.lane for loss in run.losses} == lost


@pytest.mark.parametrize("seed", range(5))
def test_a_lane_is_lost_while_weights_go_to_workers_that_were_moved(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane comes back alone and gets its weights; who was to get them after it never did."""
    real = moving.carry_out_now
    cut = {"a.score": StagePlan(chunk=1)}  # so that both lanes have calls
    before = plan_of({"a": [0], "b": [2]}, stages=cut)
    after = plan_of({"a": [0, 1], "b": [2]}, stages=cut)
    world = CrashSchedule(replace(CASE, plan=after), Faults(), seed).world
    batches = [world.batch(SOURCE, step, range(4)) for step in range(4)]

    def lose(carrier: Any, command: Any, seconds: float) -> None:
        if isinstance(command, InstallWeights):
            monkeypatch.setattr(moving, "carry_out_now", real)
            world.lanes[0].die("killed")
        real(carrier, command, seconds)

    with virtual_time(world):
        lanes = tuple(map(LaneSpec, (0, 1, 2)))
        workers = {"a": Stateless(), "b": Stateful()}
        run = launched(world, lanes, before, workers, 0, 8, None)
        given = [result.step for result in run.steps(batches[:2])]
        monkeypatch.setattr(moving, "carry_out_now", lose)
        run._lasting(lambda: run.replan(after))
        given += [result.step for result in run.steps(batches[2:])]
    assert given == [0, 1, 2, 3]
    assert [loss.lane for loss in run.losses] == [0]


REPLICAS = Case(
    CASE.graph,
    plan_of({"a": [0], "b": [1, 2]}, stages={"b.train": StagePlan(chunk=1)}),
    num_items=8,
    num_steps=8,
    seed=0,
)
"""The learner has two replicas, which fold a mini-batch in bit by bit."""


def play_replicas(patch: pytest.MonkeyPatch) -> int:
    """How often a run went on from what a replica held, where there are no snapshots."""
    patch.setattr(Recovery, "is_due", lambda *_: False)
    taken = 0
    for seed in range(60):
        schedule = CrashSchedule(REPLICAS, Faults(lose=0.03, most=8), seed)
        schedule.run()
        taken += schedule.world.events["states of replicas taken over"]
    return taken


def test_a_run_goes_on_from_what_a_replica_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play_replicas(monkeypatch) > 5


@pytest.mark.parametrize(
    ("kind", "name", "broken"),
    [(Runner, "unlearnt", True), (moving, "discard_later", lambda *_: [])],
)
def test_the_state_of_a_replica_is_one_between_two_steps(
    kind: object, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, name, broken)
    with pytest.raises(AssertionError, match="mini-batch"):
        play_replicas(monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(cases(max_calls=9, max_steps=6), st.integers(0, 2**32), st.sampled_from(SCHEDULES))
@settings(ordinary, max_examples=5_000)
def test_many_runs_go_on_or_say_why_not(case: Case, seed: int, faults: Faults) -> None:
    CrashSchedule(case, faults, seed).run()
