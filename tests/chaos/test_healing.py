"""Lanes without a learner that are killed: they come back while the step goes on.

The flow is the one of `dying_workers`, which counts in integers. Its learner notes what it folds
in and every mini-batch that it ends, so that a step that is taken again, and an item that is lost
or doubled, is seen.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import m2flow
from m2flow import Batch, Flow, Stream, stage
from m2flow.engine.plan import Plan, StagePlan
from m2flow.errors import RunFailed
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.launch import Run
from m2flow.runtime.driver.mending import comes_back_alone
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import LOST
from tests.chaos.dying_workers import (
    APART,
    ITEMS,
    LANES,
    SAMPLES,
    STEPS,
    TOGETHER,
    Death,
    Judge,
    Learner,
    Sampler,
    Training,
    plan,
    prompts,
    seen,
    start,
)

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

SAMPLER, JUDGE, LEARNER = 0, 1, 2
"""The lanes of `APART`."""

IN_PIECES = replace(APART, stages={"judge.score": StagePlan(4), "learner.train": StagePlan(4)})

TWO_SAMPLERS = plan(sampler=((0,), (1,)), judge=((1,),), learner=((2,),))
TWO_LEARNERS = plan(sampler=((0,),), judge=((0,),), learner=((1,), (2,)))


class Hasty(Judge):
    """Says all that the learner wants to know."""

    @stage
    def score(self, batch: Batch) -> Batch:
        return batch.with_columns(a=batch["y"] % 17, z=batch["y"] * 2)


class Direct(Flow):
    """The learner begins while the sampler is still at it."""

    sampler: Sampler
    judge: Hasty
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        return self.learner.train(self.judge.score(self.sampler.generate(prompts)))

    def sync(self) -> None:
        self.learner.publish(self.sampler)


@pytest.fixture(scope="module")
def lanes() -> Iterator[LanePool]:
    with LanePool(LANES) as pool:
        yield pool


@pytest.fixture
def pool(lanes: LanePool) -> Iterator[LanePool]:
    yield lanes
    if lanes.lost:
        lanes.restart(list(lanes.lost))


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    with start(APART, Death(), None) as run:
        return seen(run).figures


@pytest.fixture
def death(tmp_path: Path) -> Callable[..., Death]:
    """A death whose learner notes what it does."""
    (folder := tmp_path / "deaths").mkdir()

    def of(moment: str = "", version: int = 0, **options: Any) -> Death:
        return Death(moment, version, str(folder), notes=str(tmp_path / "notes"), **options)

    return of


def check_once(noted: list[str], replicas: int = 1) -> None:
    """Every item was folded in once, and every mini-batch ended once, in order."""
    each = ITEMS * SAMPLES // 2
    folded = [
        f"folds {item + each * half} of {2 * step + half}"
        for step in range(STEPS)
        for half in range(2)
        for item in range(each)
    ]
    assert Counter(line for line in noted if line[0] == "f") == Counter(folded)
    ended = [line for line in noted if line[0] == "e"]
    assert ended == [f"ends {n}" for n in range(2 * STEPS) for _ in range(replicas)]


def processes(pool: LanePool) -> dict[int, int]:
    return {lane: address.process_id for lane, address in pool.addresses.items()}


def kill(pool: LanePool, lane: int) -> None:
    os.kill(pool.addresses[lane].process_id, signal.SIGKILL)


@pytest.mark.parametrize(
    ("chosen", "moment", "version", "more"),
    [
        (APART, "generate", 0, {}),
        (APART, "generate", 0, {"by": "segfault"}),
        pytest.param(APART, "generate", 0, {"by": "exit"}, marks=pytest.mark.slow),
        (APART, "generate", 2, {}),
        pytest.param(APART, "score", 0, {}, marks=pytest.mark.slow),
        (IN_PIECES, "score", 2, {}),
        (APART, "install", 3, {}),
        (APART, "answer", 2, {}),
        (APART, "generate", 1, {"beside": True}),
        (TWO_SAMPLERS, "generate", 1, {}),
        (TWO_LEARNERS, "generate", 1, {}),
    ],
)
def test_nobody_else_goes_back(
    chosen: Plan,
    moment: str,
    version: int,
    more: dict[str, Any],
    pool: LanePool,
    death: Callable[..., Death],
    undisturbed: list[Any],
) -> None:
    before, of = processes(pool), death(moment, version, **more)
    with start(chosen, of, pool) as run:
        found = seen(run)
    assert found.figures == undisturbed
    check_once(of.noted(), len(chosen.placements["learner"].lanes))
    (loss,) = run.losses
    assert loss.healed
    assert loss.steps == 0
    assert "the step has gone on" in str(loss)
    changed = {lane for lane, process in processes(pool).items() if before[lane] != process}
    assert changed == {loss.lane}
    spans = [span for result in found.steps for span in result.spans if span.name == LOST]
    assert [span.lane for span in spans] == ([] if moment == "answer" else [loss.lane])


def test_the_learner_has_changed_since_the_weights_went_out(
    pool: LanePool, death: Callable[..., Death]
) -> None:
    """The lane that comes back has those that went out, as its other items had."""

    def figures(of: Death, **where: Any) -> tuple[Run, list[Any]]:
        flow = Direct(sampler=Sampler(of), judge=Hasty(of), learner=Learner(of))
        with m2flow.launch(flow, items_per_step=ITEMS, **where) as run:
            results = run.steps(prompts(step) for step in range(STEPS))
            return run, [(r.metrics, r.output["y"].tolist()) for r in results]

    of = death("generate", 2, after="ends 4")
    _, wanted = figures(Death(), mode="eager")
    run, found = figures(of, plan=IN_PIECES, lanes=pool)
    assert found == wanted
    check_once(of.noted())
    assert [(loss.lane, loss.healed) for loss in run.losses] == [(SAMPLER, True)]


def test_process_groups_of_an_earlier_run_hold_nobody_back(
    pool: LanePool, death: Callable[..., Death], undisturbed: list[Any]
) -> None:
    pool.restart([lane.id for lane in LANES])
    with start(TWO_LEARNERS, Death(), pool) as run:
        assert seen(run).figures == undisturbed
    assert pool.keeper == JUDGE
    with start(APART, death("score", 1), pool) as run:
        assert seen(run).figures == undisturbed
    assert [(loss.lane, loss.healed) for loss in run.losses] == [(JUDGE, True)]


def test_a_lane_is_lost_twice(
    pool: LanePool, death: Callable[..., Death], undisturbed: list[Any]
) -> None:
    of = death("score", 2, times=2)
    with start(APART, of, pool) as run:
        assert seen(run).figures == undisturbed
    check_once(of.noted())
    assert [(loss.lane, loss.healed) for loss in run.losses] == [(JUDGE, True)] * 2


def test_a_lane_is_lost_between_two_steps(pool: LanePool, death: Callable[..., Death]) -> None:
    def outputs(pool: LanePool | None, of: Death, victim: int = -1) -> tuple[Run, list[Any]]:
        found = []
        with start(APART, of, pool) as run:
            for step in range(STEPS):
                found.append(run.step(prompts(step)).output["z"].tolist())
                if pool is not None and step == 1:
                    kill(pool, victim)
                    run.worker_call("learner", "state")
                found.append(run.worker_call("learner", "state"))
        return run, found

    _, wanted = outputs(None, Death())
    for victim in (SAMPLER, JUDGE):
        run, found = outputs(pool, of := death(), victim)
        assert found == wanted
        check_once(of.noted())
        Path(of.notes).unlink()
        assert [(loss.lane, loss.healed) for loss in run.losses] == [(victim, True)]


def test_a_lane_is_lost_while_another_one_comes_back(
    pool: LanePool,
    death: Callable[..., Death],
    undisturbed: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, begun = LanePool.begin, list[int]()

    def and_another(self: LanePool, lane: int) -> Any:
        begun.append(lane)
        if begun == [JUDGE]:
            kill(self, SAMPLER)
        return begin(self, lane)

    monkeypatch.setattr(LanePool, "begin", and_another)
    of = death("score", 2)
    with start(APART, of, pool) as run:
        assert seen(run).figures == undisturbed
    check_once(of.noted())
    assert begun == [JUDGE, SAMPLER]
    assert sorted((loss.lane, loss.healed) for loss in run.losses) == [
        (SAMPLER, True),
        (JUDGE, True),
    ]


def test_a_lane_is_lost_again_while_it_comes_back(
    pool: LanePool,
    death: Callable[..., Death],
    undisturbed: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That costs a second start, and is one loss."""
    meet, met = LanePool.meet, list[int]()

    def and_it_dies(self: LanePool, lane: int, started: Any) -> None:
        meet(self, lane, started)
        met.append(lane)
        if len(met) == 1:
            kill(self, lane)

    monkeypatch.setattr(LanePool, "meet", and_it_dies)
    of = death("generate", 2)
    with start(APART, of, pool, lane_restarts=2) as run:
        assert seen(run).figures == undisturbed
    check_once(of.noted())
    assert met == [SAMPLER, SAMPLER]
    assert [(loss.lane, loss.healed) for loss in run.losses] == [(SAMPLER, True)]


def test_a_lane_that_never_comes_back_ends_the_run(
    pool: LanePool, death: Callable[..., Death], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many starts as it may have, with the first cause on top."""
    meet, met = LanePool.meet, list[int]()

    def and_it_dies(self: LanePool, lane: int, started: Any) -> None:
        meet(self, lane, started)
        met.append(lane)
        kill(self, lane)

    of = death("score", 2, beside=True)
    with monkeypatch.context() as patch:
        patch.setattr(LanePool, "meet", and_it_dies)
        run = start(APART, of, pool, lane_restarts=2)
        with run, pytest.raises(RunFailed) as caught:
            seen(run)
    first, second, *_ = str(caught.value).splitlines()
    assert first.startswith("lane 1 was lost: the scorer was ended by SIGKILL")
    assert "started again 2 times, which is the most (`lane_restarts`)" in second
    assert met == [JUDGE, JUDGE]


def test_a_learner_that_is_lost_beside_another_lane_goes_back(
    pool: LanePool,
    death: Callable[..., Death],
    undisturbed: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, begun = LanePool.begin, list[int]()

    def and_the_learner(self: LanePool, lane: int) -> Any:
        begun.append(lane)
        kill(self, LEARNER)
        return begin(self, lane)

    monkeypatch.setattr(LanePool, "begin", and_the_learner)
    with start(APART, death("score", 2), pool) as run:
        assert seen(run).figures == undisturbed
    assert begun == [JUDGE]
    losses = {loss.lane: loss for loss in run.losses}
    assert losses.keys() == {JUDGE, LEARNER}
    assert not any(loss.healed for loss in run.losses)


def test_steps_that_overlap_go_on(pool: LanePool, death: Callable[..., Death]) -> None:
    of = death("generate", 2)
    with start(replace(APART, max_staleness=1), of, pool) as run:
        results = list(run.steps(prompts(step) for step in range(STEPS)))
    check_once(of.noted())
    assert [result.step for result in results] == list(range(STEPS))
    assert [result.output["x"].tolist() for result in results] == [
        prompts(step).repeat(SAMPLES)["x"].tolist() for step in range(STEPS)
    ]
    assert all((result.staleness or 0) <= 1 for result in results)
    assert [(loss.lane, loss.healed) for loss in run.losses] == [(SAMPLER, True)]


def test_rollouts_are_kept_by_a_lane_that_is_back(
    pool: LanePool, death: Callable[..., Death], undisturbed: list[Any], tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal", 1 << 20)
    with start(APART, death("generate", 1), pool) as run:
        run.keep_rollouts(journal)
        assert seen(run).figures == undisturbed
        graph = run.graph
    assert [loss.healed for loss in run.losses] == [True]
    for step in range(1, STEPS):
        (kept,) = journal.of_step(step, graph, ITEMS, 0)
        assert sorted(kept.batch.ids) == list(range(ITEMS * SAMPLES))


def test_a_run_goes_over_to_another_plan_with_a_lane_that_is_back(
    pool: LanePool, death: Callable[..., Death], undisturbed: list[Any]
) -> None:
    """One that it left out of the process groups: all lanes meet anew."""
    of = death("generate", 1)
    figures: list[Any] = []
    with start(TWO_LEARNERS, of, pool) as run:
        for chosen, part in ((None, range(2)), (TOGETHER, range(2, STEPS))):
            if chosen is not None:
                assert [loss.healed for loss in run.losses] == [True]
                run.replan(chosen)
            steps = list(run.steps(prompts(step) for step in part))
            figures += [(r.step, r.version, r.metrics, r.output["z"].tolist()) for r in steps]
    assert figures == undisturbed[4:]


def test_which_lanes_come_back_alone() -> None:
    workers = {"sampler": Sampler(Death()), "judge": Judge(Death()), "learner": Learner(Death())}
    graph = Training(**workers).trace()
    gang = plan(sampler=((0, 1),), judge=((0,),), learner=((2,),))

    def alone(chosen: Plan) -> list[int]:
        return [x.id for x in LANES if comes_back_alone(x.id, chosen, [graph], workers)]

    assert alone(APART) == [0, 1]
    assert alone(TOGETHER) == []
    assert alone(TWO_SAMPLERS) == [0, 1]
    assert alone(TWO_LEARNERS) == [0]
    assert alone(gang) == []
