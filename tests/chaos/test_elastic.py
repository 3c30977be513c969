"""Lanes that are lost for good, and lanes that come back: an elastic run gives the same figures.

The flow is the one of `dying_workers`, which counts in integers: results are compared without
tolerance, whatever lanes they were made on.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

import m2flow
from m2flow import Batch, Isolation, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed
from m2flow.observe.progress import Quiet
from m2flow.observe.run_directory import read_metrics
from m2flow.plan import build_plan, to_json
from m2flow.runtime.driver import supervision
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.launch import Run
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import BACK, LOST
from m2flow.runtime.lane.orders import Probe
from m2flow.workloads.common.planning import flow_of
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.start import train
from tests.chaos.dying_workers import (
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
from tests.cli.conftest import TINY
from tests.runtime.local_cluster import local_cluster

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

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
        pytest.param("hybrid", "score", 2, marks=pytest.mark.slow),
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


def test_lanes_that_come_back_at_once_know_each_other(pool: LanePool) -> None:
    for lane in (1, 2):
        os.kill(pool.addresses[lane].process_id, signal.SIGKILL)

    def both_lost() -> bool:
        pool.receive(0.1)
        return pool.lost.keys() == {1, 2}

    wait_for(both_lost)
    pool.give_up([1, 2])
    assert pool.call_back(1)
    assert pool.call_back(2)
    up = [ready for ready, _ in pool.processes._awaited.values()]
    ray.wait(up, num_returns=2, timeout=BACK_SECONDS)
    assert pool.take_in().keys() == {1, 2}
    for asker, asked in ((1, 2), (2, 1), (0, 2), (1, 0)):
        answer = pool.ask(asker, partial(Probe, peers=(asked,)))
        assert not answer.raised, pickle.loads(answer.value)


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


def refuse_one_restart(pool: LanePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a lane given up the first time that it is lost, and looked for all the time."""
    monkeypatch.setattr(supervision, "LOOK_SECONDS", 0.0)
    restart, refused = pool.restart, []

    def refused_once(some: Any) -> None:
        if not refused:
            refused.append(some)
            raise RunFailed("lanes have not come up")
        restart(some)

    monkeypatch.setattr(pool, "restart", refused_once)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("collocated", marks=pytest.mark.slow),
        pytest.param("disaggregated", marks=pytest.mark.slow),
        "auto",
    ],
)
def test_a_lane_that_comes_back_is_taken_in(
    mode: str, pool: LanePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first process does not come up; a later one starts beside the steps."""
    refuse_one_restart(pool, monkeypatch)
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


class Examiner(Worker):
    """Has a process of its own, and nothing to do in a step."""

    isolation = Isolation()

    @stage
    def look(self, prompts: Batch) -> Batch:
        return prompts.with_columns(y=prompts["x"])


class Examined(Training):
    examiner: Examiner

    def evaluate(self, prompts: Stream) -> Stream:
        return self.examiner.look(prompts)


def test_the_loss_of_a_lane_that_only_an_evaluation_needs_ends_the_run_in_words() -> None:
    flow = Examined(
        sampler=Sampler(Death()),
        judge=Judge(Death()),
        learner=Learner(Death()),
        examiner=Examiner(),
    )
    run = m2flow.launch(
        flow,
        items_per_step=ITEMS,
        also={"evaluate": ITEMS},
        lanes="cpu:2",
        mode="collocated",
        elastic=True,
        lane_restarts=0,
    )
    with run:
        run.step(prompts(0))
        assert run._pool is not None
        (own,) = [lane.id for lane in run._pool.lanes if lane.reserved_for == "examiner"]
        os.kill(run._pool.addresses[own].process_id, signal.SIGKILL)
        with pytest.raises(RunFailed, match="no plan for the lanes that are left: lanes: the plan"):
            run.run_method("evaluate", prompts(9))


class TwoAtMost(Learner):
    """Cannot be loaded on three lanes once it has learnt; there its other lanes wait for it."""

    def load(self, place: Any) -> None:
        super().load(place)
        if place.version and place.size == 3 and place.rank == 2:
            raise MemoryError("no room for 7 GB")
        place.all_reduce([torch.zeros(1)])


class LoadedOnTwoAtMost(Judge):
    """Cannot be loaded on three lanes once two have been enough; the others load it."""

    def load(self, place: Any) -> None:
        super().load(place)
        if place.version and place.size == 3 and place.rank == 2:
            raise MemoryError("no room for 7 GB")


@pytest.mark.parametrize("waits", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_lane_that_comes_back_and_cannot_be_loaded_is_given_up_again(
    waits: bool, pool: LanePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_one_restart(pool, monkeypatch)
    death = Death("finish", 1, str(tmp_path))
    learner, judge = (TwoAtMost, Judge) if waits else (Learner, LoadedOnTwoAtMost)
    flow = Training(sampler=Sampler(death), judge=judge(death), learner=learner(death))
    run = m2flow.launch(
        flow, items_per_step=ITEMS, lanes=pool, mode="collocated", elastic=True, lane_restarts=2
    )

    def until_given_up_again(more: int = 3) -> Iterator[Any]:
        step, deadline = 0, time.monotonic() + BACK_SECONDS
        while more:
            assert time.monotonic() < deadline, "nothing was given up"
            more -= len(run.losses) == 2
            yield prompts(step)
            step += 1

    with run:
        results = list(run.steps(until_given_up_again()))
        first, second = run.losses[:2]
        assert run.missing == 1
        assert not run.returns
        assert {lane.id for lane in run.plan.lanes} == {0, 1, 2} - {first.lane}
        asked = run.worker_call("learner", "state")
    assert second.lane == first.lane
    assert second.reason.startswith("plan ")
    assert "cannot be loaded: " in second.reason
    assert "no room for 7 GB" in second.reason
    assert second.given_up == supervision.REFUSED
    with start(None, Death()) as eager:
        wanted = list(eager.steps(prompts(step) for step in range(len(results))))
        assert asked == eager.worker_call("learner", "state")
    figures = [(r.step, r.version, r.metrics, r.output["z"].tolist()) for r in results]
    assert figures == [(r.step, r.version, r.metrics, r.output["z"].tolist()) for r in wanted]


class Strikes(Quiet):
    """Kills a lane once, and later waits until it may come back; hears what is said of it."""

    def __init__(self, pools: list[LanePool]) -> None:
        self.pools, self.said = pools, list[str]()

    def note(self, text: str) -> None:
        self.said += [text] if text.startswith("lane ") else []

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        if metrics is None or "lanes/missing" not in metrics:
            return
        if step == 4:
            os.kill(self.pools[0].addresses[1].process_id, signal.SIGKILL)
        if step == 10:
            (pool,) = self.pools
            wait_for(lambda: pool.processes.has_news or not pool.missing)


@pytest.mark.slow
def test_process_groups_of_gangs_are_made_anew_with_every_set_of_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner divided over three lanes, over two of them, and over three again. In float64 no
    rounding changes a draw."""
    monkeypatch.setattr(supervision, "LOOK_SECONDS", 0.0)
    (tmp_path / "tiny.yaml").write_text(TINY)
    settings = {"steps": 15, "model.dtype": "float64", "elastic": True, "evaluation.every": 100}

    def weights(run: Path) -> dict[str, Any]:
        found: dict[str, Any] = load_file(run / "checkpoints/latest/model/model.safetensors")
        return found

    recipe = read_recipe(tmp_path / "tiny.yaml", settings)
    flow = flow_of(recipe)
    known = {layout.name: layout for layout in flow.workers["learner"].layouts("cpu", 3)}
    layouts = {"learner": known["fsdp3"]}
    items = recipe.items_per_step
    plan = build_plan("collocated", flow.trace(), LANES, items, layouts=layouts)
    (tmp_path / "plan.json").write_text(to_json(plan))

    pools: list[LanePool] = []
    start_lanes, restart = LanePool.__init__, LanePool.restart

    def started(self: LanePool, *given: Any, **options: Any) -> None:
        start_lanes(self, *given, **options)
        pools.append(self)

    def refused_once(self: LanePool, some: Any) -> None:
        monkeypatch.setattr(LanePool, "restart", restart)
        raise RunFailed("lanes have not come up")

    monkeypatch.setattr(LanePool, "__init__", started)
    monkeypatch.setattr(LanePool, "restart", refused_once)
    saw = Strikes(pools)
    disturbed = train(
        recipe,
        plan=tmp_path / "plan.json",
        run_dir=tmp_path / "run",
        progress=saw,
    )
    straight = train(recipe, {"mode": "eager"}, run_dir=tmp_path / "eager", progress=Quiet())
    lost, back = saw.said
    assert "lanes have not come up: on without it after " in lost
    assert "collocated on 2 lanes" in lost
    assert "on with it, collocated on 3 lanes" in back
    missing = [row["lanes/missing"] for row in read_metrics(disturbed) if row["step"]]
    assert missing[:4] == [0.0] * 4
    assert missing[4] == 1.0
    assert missing[-1] == 0.0
    assert "fsdp3" in (disturbed / "plan.json").read_text()
    found, wanted = weights(disturbed), weights(straight)
    for name, tensor in wanted.items():
        assert found[name].allclose(tensor, rtol=0, atol=1e-9), name
