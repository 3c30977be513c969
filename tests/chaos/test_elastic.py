"""Lanes that are lost for good, and lanes that come back: an elastic run gives the same figures.

The flow is the one of `test_lane_loss`, which counts in integers: results are compared without
tolerance, whatever lanes they were made on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import m2flow
from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed
from m2flow.runtime.driver import supervision
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.launch import Run
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import BACK, LOST
from tests.chaos.test_lane_loss import (
    APART,
    ITEMS,
    Death,
    Judge,
    Learner,
    Sampler,
    Training,
    prompts,
    seen,
)
from tests.runtime.local_cluster import local_cluster

LANES = tuple(LaneSpec(number) for number in range(3))

BACK_SECONDS = 90.0
"""Longest to wait for a lane that is called back: a process starts beside whatever else runs."""


@pytest.fixture(scope="module")
def lanes() -> Iterator[LanePool]:
    with local_cluster(len(LANES)), LanePool(LANES) as pool:
        yield pool


@pytest.fixture
def pool(lanes: LanePool) -> Iterator[LanePool]:
    """Three lanes, which are all there again for the next test."""
    yield lanes
    if lanes.lost:
        lanes.restart(list(lanes.lost))

    def all_there() -> bool:
        for lane in lanes.missing.keys() - lanes.processes.awaited:
            lanes.call_back(lane)
        lanes.take_in()
        return not lanes.missing

    wait_for(all_there)


def wait_for(what: Callable[[], bool], seconds: float = BACK_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def start(pool: LanePool | None, death: Death, **options: Any) -> Run:
    """A run on lanes that may be lost, each of them for good; eager without lanes."""
    flow = Training(sampler=Sampler(death), judge=Judge(death), learner=Learner(death))
    where = {"mode": "eager"} if pool is None else {"lanes": pool, "lane_restarts": 0}
    options = {**where, "elastic": True, **options}
    return m2flow.launch(flow, items_per_step=ITEMS, also={"evaluate": ITEMS}, **options)


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    with start(None, Death()) as run:
        return seen(run).figures


@pytest.mark.parametrize(
    ("mode", "moment", "version"),
    [
        ("collocated", "load", 0),
        ("collocated", "generate", 1),
        ("disaggregated", "asked", 2),
        ("hybrid", "score", 2),
        ("auto", "train", 2),
    ],
)
def test_a_run_goes_on_without_a_lane(
    mode: str, moment: str, version: int, pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    with start(pool, Death(moment, version, str(tmp_path)), mode=mode) as run:
        found = seen(run)
        assert run.missing == 1
    assert (tmp_path / "0").exists(), "nobody was killed"
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert {lane.id for lane in run.plan.lanes} == {0, 1, 2} - {loss.lane}
    assert {lane.id for lane in pool.lanes} == {0, 1, 2} - {loss.lane}
    assert loss.given_up == "it is not to be started again (`lane_restarts: 0`)"
    assert re.search(r": on without it after [\d.]+ s, \S+ on 2 lanes", str(loss)), str(loss)
    if mode != "auto":
        assert run.plan.mode == mode
    spans = [span for result in found.steps for span in result.spans if span.name == LOST]
    if moment not in ("load", "asked"):  # then no step was under way
        assert [span.lane for span in spans] == [loss.lane]


def test_where_a_mode_has_too_few_lanes_the_run_goes_on_collocated(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """The lane of the learner dies, wherever the learner is; the third one lives."""
    death = Death("finish", 1, str(tmp_path), times=2)
    with start(pool, death, mode="disaggregated") as run:
        assert seen(run).figures == undisturbed
        assert run.missing == 2
    assert [str(loss).split(", ")[-1].split(";")[0] for loss in run.losses] == [
        "disaggregated on 2 lanes",
        "collocated on 1 lane (too few for disaggregated)",
    ]
    assert run.plan.mode == "collocated"


def test_the_loss_of_the_last_lane_ends_the_run(pool: LanePool, tmp_path: Path) -> None:
    death = Death("finish", 1, str(tmp_path), times=3)
    with (
        start(pool, death, mode="disaggregated") as run,
        pytest.raises(RunFailed, match="no lane is left, so the run cannot go on"),
    ):
        seen(run)
    assert len(run.losses) == 2, "the third one was not survived"


def test_a_run_that_is_not_elastic_ends(pool: LanePool, tmp_path: Path) -> None:
    run = start(pool, Death("score", 1, str(tmp_path)), mode="collocated", elastic=False)
    with run, pytest.raises(RunFailed, match=r"lane \d was lost"):
        seen(run)
    assert not run.missing
    assert not run.losses


def test_a_plan_of_somebody_s_own_ends_with_its_lane(pool: LanePool, tmp_path: Path) -> None:
    with (
        start(pool, Death("score", 1, str(tmp_path)), plan=APART) as run,
        pytest.raises(RunFailed) as caught,
    ):
        seen(run)
    first, second = str(caught.value).splitlines()
    assert first.startswith("lane 1 was lost: ")
    assert second.startswith("no plan for the lanes that are left (0, 2): plan: is for all of its")


def test_rollouts_that_were_finished_are_not_made_again_on_other_lanes(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    folder = tmp_path / "journal"
    with start(pool, Death("finish", 1, str(tmp_path)), mode="disaggregated") as run:
        run.keep_rollouts(Journal(folder, 1 << 20))
        found = seen(run)
    assert found.figures == undisturbed
    assert [step.step for step in found.steps if step.recalled] == [1]


# --- lanes that come back -------------------------------------------------------------------------


def until_back(run: Run, more: int = 3) -> Iterator[Any]:
    """Batches until a lane was taken in, and some more."""
    step, deadline = 0, time.monotonic() + BACK_SECONDS
    while more:
        assert time.monotonic() < deadline, "no lane was taken in"
        more -= bool(run.returns)
        yield prompts(step)
        step += 1


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "auto"])
def test_a_lane_that_comes_back_is_taken_in(
    mode: str, pool: LanePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first process does not come up; a later one starts beside the steps."""
    monkeypatch.setattr(supervision, "LOOK_SECONDS", 0.0)
    restart, refused = pool.restart, []

    def refused_once(some: Any) -> None:
        if not refused:
            refused.append(some)
            raise RunFailed("lanes have not come up")
        restart(some)

    monkeypatch.setattr(pool, "restart", refused_once)
    before = {lane: address.process_id for lane, address in pool.addresses.items()}
    death = Death("finish", 1, str(tmp_path))
    with start(pool, death, mode=mode, lane_restarts=2) as run:
        results = list(run.steps(until_back(run)))
        (loss,), (back,) = run.losses, run.returns
        assert run.missing == 0
        assert {lane.id for lane in run.plan.lanes} == {0, 1, 2}
        asked = run.worker_call("learner", "state")
    figures = [(r.step, r.version, r.metrics, r.output["z"].tolist()) for r in results]
    with start(None, Death()) as eager:
        wanted = list(eager.steps(prompts(step) for step in range(len(results))))
        assert asked == eager.worker_call("learner", "state")
    assert figures == [(r.step, r.version, r.metrics, r.output["z"].tolist()) for r in wanted]
    assert loss.lane == back.lane
    assert loss.given_up == "lanes have not come up"
    assert re.fullmatch(rf"lane {back.lane} is back after \d+ s: on with it, .*", str(back))
    assert pool.addresses[back.lane].process_id != before[back.lane]
    spans = [span for result in results for span in result.spans if span.name == BACK]
    assert [span.lane for span in spans] == [back.lane]
    if mode != "auto":
        assert run.plan.mode == mode
    else:
        assert run.pilot is not None
        assert sum(change.why == "lanes" for change in run.pilot.changes) == 2
