"""Mode "auto" on real lanes: learns, races plans, and goes over to another when times change."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile
from m2flow.runtime.driver.auto import Auto
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.runner import StepResult
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS = 16
LANES = (LaneSpec(0), LaneSpec(1))


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with local_cluster(2), LanePool(LANES) as lanes:
        yield lanes


class Asker(Worker):
    """Asks a service, which takes as long for one item as for many."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @stage
    def ask(self, items: Batch) -> Batch:
        time.sleep(self.seconds)
        return items.with_columns(y=items["x"] + 1)


class Counter(Worker):
    """Takes its time for each item."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @stage
    def count(self, items: Batch) -> Batch:
        time.sleep(self.seconds * len(items))
        return items.with_columns(z=2 * items["x"])


@stage
def joined(asked: Batch, counted: Batch) -> Batch:
    return asked.with_columns(z=asked["y"] + counted["z"])


class Fork(Flow):
    """Ask and count; neither needs the other."""

    asker: Asker
    counter: Counter

    def step(self, items: Stream) -> Stream:
        return joined(self.asker.ask(items), self.counter.count(items))


def fork(ask: float, count: float) -> Fork:
    return Fork(asker=Asker(ask), counter=Counter(count))


def assumed(ask: float, count: float) -> Profile:
    """A profile in which a call of `ask` takes so long for any number of items."""
    return Profile(
        {
            "asker.ask": StageProfile((StageCost(1, Piecewise(((1.0, ask), (16.0, ask)))),)),
            "counter.count": StageProfile(
                (StageCost(1, Piecewise(((1.0, count), (16.0, 16 * count)))),)
            ),
            "joined": StageProfile((StageCost(1, Piecewise(((1.0, 1e-4), (16.0, 1e-4)))),)),
        }
    )


def batches(count: int) -> list[Batch]:
    return [Batch({"x": torch.arange(ITEMS) + ITEMS * step}) for step in range(count)]


def assert_right(results: Sequence[StepResult]) -> None:
    """Whatever plans a run has tried, it has computed the same."""
    for step, result in enumerate(results):
        assert result.step == step
        assert torch.equal(result.output["z"], 3 * batches(len(results))[step]["x"] + 1)


def test_a_run_of_which_nothing_is_known_learns_and_finds_the_better_plan(pool: LanePool) -> None:
    """One lane asks the slow service while the other one counts."""
    kept: list[Profile] = []
    auto = Auto(num_steps=40, keep=kept.append)
    flow = fork(0.2, 0.0125)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        assert run.plan.mode == "collocated"
        results = list(run.steps(batches(20)))
        assert len(run.plan.placements["asker"].lanes) == 1
        assert run.pilot is not None
        assert run.pilot.race is not None
        assert run.pilot.race.over
        assert run.plan.predicted_seconds == pytest.approx(run.pilot.race.leader.seconds)
    assert kept[-1].source == "measured"
    assert_right(results)


def test_a_stored_profile_that_is_wrong_is_corrected(pool: LanePool) -> None:
    auto = Auto(profile=assumed(0.02, 0.0125), num_steps=40)
    flow = fork(0.2, 0.0125)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        results = list(run.steps(batches(16)))
        assert len(run.plan.placements["asker"].lanes) == 1
        assert run.pilot is not None
        assert run.pilot.profile is not None
        corrected = run.pilot.profile.stage("asker.ask").costs[0].seconds.at(ITEMS)
        assert corrected == pytest.approx(0.2, rel=0.3)
    assert_right(results)


def test_a_plan_that_would_not_repay_its_pause_is_left_alone(pool: LanePool) -> None:
    auto = Auto(profile=assumed(0.02, 0.0125), num_steps=8)
    flow = fork(0.2, 0.0125)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        run.load_seconds = 1000.0
        before = run.plan
        assert_right(list(run.steps(batches(8))))
        assert run.plan.placements["asker"] == before.placements["asker"]
        assert run.plan.placements["counter"] == before.placements["counter"]


def test_what_is_as_predicted_stays(pool: LanePool) -> None:
    auto = Auto(profile=assumed(0.05, 0.01), num_steps=40)
    flow = fork(0.05, 0.01)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        before = run.plan
        assert run.pilot is not None
        assert run.pilot.decision is not None
        predicted = float(run.pilot.decision.chosen.prediction.seconds)
        results = list(run.steps(batches(9)))
        assert run.plan.placements["asker"] == before.placements["asker"]
    assert predicted == pytest.approx(0.08 + 0.04, rel=0.5)
    assert_right(results)


class Service(Worker):
    """Asks a service that takes as long as the item says that takes longest."""

    @stage
    def ask(self, items: Batch) -> Batch:
        time.sleep(float(items["seconds"].max()))
        return items.with_columns(y=items["x"] + 1)


class Serving(Flow):
    """Like Fork, with a service whose pace changes."""

    asker: Service
    counter: Counter

    def step(self, items: Stream) -> Stream:
        return joined(self.asker.ask(items), self.counter.count(items))


def test_a_drift_that_lasts_leads_to_another_choice(pool: LanePool) -> None:
    """The service becomes slow in the middle of the run."""
    auto = Auto(num_steps=44)
    flow = Serving(asker=Service(), counter=Counter(0.0125))
    paces = [0.02] * 24 + [0.3] * 20
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        steps = run.steps(
            one.with_columns(seconds=torch.full((ITEMS,), pace, dtype=torch.float64))
            for one, pace in zip(batches(len(paces)), paces, strict=True)
        )
        results = list(islice(steps, 24))
        assert run.pilot is not None
        first, expected = run.pilot.decision, run.plan.predicted_seconds
        results += list(steps)
        assert run.pilot.decision is not first
        assert expected is not None
        assert run.plan.predicted_seconds is not None
        assert run.plan.predicted_seconds > expected + 0.1
        assert len(run.plan.placements["asker"].lanes) == 1
    assert_right(results)
