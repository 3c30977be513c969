"""Mode "auto" on real lanes: measures, chooses, and goes over to another plan when times change."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile
from m2flow.runtime.driver.auto import Auto
from m2flow.runtime.driver.pool import LanePool
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


def test_a_drift_that_lasts_brings_another_plan_if_it_pays(pool: LanePool) -> None:
    """The service has become slow: from then on one lane asks it, while the other one counts."""
    auto = Auto(profile=assumed(0.002, 0.004), num_steps=100)
    flow = fork(0.064, 0.004)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        before = run.plan
        results = list(run.steps(batches(16)))
        assert run.pilot is not None
        (change,) = run.pilot.changes
        assert len(before.placements["asker"].lanes) == len(LANES)
        assert len(run.plan.placements["asker"].lanes) == 1
        assert {"asker", "counter"} <= {*change.moved}
        assert 6 <= change.before <= 8
        assert change.drift > 1.5
        assert change.pause < 2
        early = min(result.seconds for result in results[: change.before])
        late = min(result.seconds for result in results[change.before :])
        assert late < 0.85 * early
        assert late == pytest.approx(float(change.becomes), rel=0.3)
    for step, result in enumerate(results):
        expected = 3 * batches(16)[step]["x"] + 1
        assert torch.equal(result.output["z"], expected)


def test_a_plan_that_would_not_repay_its_pause_is_left_alone(pool: LanePool) -> None:
    auto = Auto(profile=assumed(0.002, 0.004), num_steps=8)
    flow = fork(0.064, 0.004)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        run.load_seconds = 1000.0
        before = run.plan
        list(run.steps(batches(8)))
        assert run.pilot is not None
        assert not run.pilot.changes
        assert run.plan.placements == before.placements


def test_what_is_as_predicted_stays(pool: LanePool) -> None:
    auto = Auto(profile=assumed(0.05, 0.01), num_steps=40)
    flow = fork(0.05, 0.01)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        results = list(run.steps(batches(9)))
        assert run.pilot is not None
        assert not run.pilot.changes
        predicted = float(run.pilot.decision.chosen.prediction.seconds)
    assert min(result.seconds for result in results) == pytest.approx(predicted, rel=0.15)


def test_auto_measures_on_a_sample(pool: LanePool) -> None:
    auto = Auto(sample=batches(2), budget_seconds=8.0)
    flow = fork(0.03, 0.005)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        result = run.step(batches(1)[0])
        assert run.pilot is not None
        decision = run.pilot.decision
        assert decision.profile.source == "measured"
        assert decision.chosen.plan.predicted_seconds == pytest.approx(result.seconds, rel=0.5)


def test_auto_without_a_sample_or_a_profile_is_refused(pool: LanePool) -> None:
    with pytest.raises(UserError, match="sample"):
        m2flow.launch(fork(0.0, 0.0), items_per_step=ITEMS, mode="auto", lanes=pool)
