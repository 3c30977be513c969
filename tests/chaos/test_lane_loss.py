"""Lanes that are killed in the middle of something: the run gives what an undisturbed one gives.

Or it ends and says why. The flow is the one of `dying_workers`.
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from m2flow import Worker
from m2flow.engine.plan import Plan
from m2flow.errors import RunFailed
from m2flow.runtime.driver import processes as processes_module
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import LOST, Recovery
from tests.chaos.dying_workers import (
    APART,
    GANG,
    ITEMS,
    LANES,
    SAMPLES,
    STEPS,
    TOGETHER,
    Death,
    Judge,
    Learner,
    Pair,
    prompts,
    seen,
    start,
)

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module


class RingedJudge(Judge):
    """Refers to itself; its file, named by its lane, is there as long as it is."""

    def load(self, place: Any) -> None:
        super().load(place)
        self.me = self
        file = Path(self.death.folder) / f"alive {place.lane} {id(self)}"
        file.touch()
        weakref.finalize(self, file.unlink)


class Forgetful(Learner):
    """Does not say how its state is saved."""

    save = Worker.save
    restore = Worker.restore


def test_workers_from_before_a_loss_give_their_memory_back(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """One that was closed, and referred to itself, stayed beside the one that was loaded then.

    Stands before the tests of process groups, for whose sake all lanes are started again.
    """
    with start(APART, Death("train", 1, str(tmp_path)), pool, judge=RingedJudge) as run:
        process = pool.addresses[1].process_id
        assert seen(run).figures == undisturbed
        alive = [file.name.split()[1] for file in tmp_path.glob("alive *")]
    assert [loss.lane for loss in run.losses] == [2], "the learner's lane was to be lost"
    assert pool.addresses[1].process_id == process, "the judge's lane was to stay"
    assert alive == ["1"]


@pytest.mark.parametrize(
    ("chosen", "moment", "version"),
    [
        (APART, "load", 0),
        (APART, "generate", 0),
        (APART, "score", 2),
        (APART, "train", 1),
        (APART, "publish", 2),
        (APART, "publish", STEPS),  # the last one: whoever evaluates waits for nobody that is gone
        (APART, "install", 3),
        (APART, "asked", 4),
        (APART, "save", 1),
        (TOGETHER, "finish", 3),
        (GANG, "train", 1),
        (GANG, "finish", 3),
    ],
)
def test_a_run_that_loses_a_lane_gives_what_an_undisturbed_one_gives(
    chosen: Plan,
    moment: str,
    version: int,
    pool: LanePool,
    tmp_path: Path,
    undisturbed: list[Any],
) -> None:
    before = {lane: address.process_id for lane, address in pool.addresses.items()}
    learner = Pair if chosen is GANG else Learner
    with start(chosen, Death(moment, version, str(tmp_path)), pool, learner=learner) as run:
        found = seen(run)
    assert (tmp_path / "0").exists(), "nobody was killed"
    assert found.figures == undisturbed
    (loss,) = run.losses
    after = {lane: address.process_id for lane, address in pool.addresses.items()}
    assert before[loss.lane] != after[loss.lane]
    if chosen is APART:
        changed = {lane for lane in before if before[lane] != after[lane]}
        assert changed == {loss.lane}, "lanes that were up were started again"
    assert str(loss).startswith(f"lane {loss.lane} was lost (")
    assert "; back after " in str(loss)
    spans = [span for result in found.steps for span in result.spans if span.name == LOST]
    # At those three no step was under way, and the next one tells.
    if moment not in ("load", "answer", "asked"):
        assert [span.lane for span in spans] == [loss.lane]


@pytest.mark.parametrize(
    ("moment", "version", "again"), [("generate", 2, 0), ("score", 3, 0), ("finish", 3, 3)]
)
def test_a_run_goes_on_from_a_replica_that_has_not_learnt_since_the_last_step(
    moment: str,
    version: int,
    again: int,
    pool: LanePool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[Any],
) -> None:
    monkeypatch.setattr(Recovery, "is_due", lambda *_: False)
    with start(TOGETHER, Death(moment, version, str(tmp_path)), pool) as run:
        found = seen(run)
    assert (tmp_path / "0").exists(), "nobody was killed"
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert loss.steps == again, "there was no snapshot but that of the start"


@pytest.mark.parametrize(("moment", "version"), [("generate", 1), ("score", 2), ("install", 3)])
def test_a_process_that_a_worker_has_started_is_gone(
    moment: str, version: int, pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """The lane of that worker is started again, and says why."""
    before = {lane: address.process_id for lane, address in pool.addresses.items()}
    death = Death(moment, version, str(tmp_path), beside=True)
    with start(APART, death, pool) as run:
        found = seen(run)
    assert (tmp_path / "0").exists(), "nobody was killed"
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert loss.lane == (1 if moment == "score" else 0)
    assert loss.reason == "the scorer was ended by SIGKILL"
    assert pool.addresses[loss.lane].process_id != before[loss.lane]


def test_processes_that_are_gone_again_and_again_end_the_run(
    pool: LanePool, tmp_path: Path
) -> None:
    death = Death("score", 1, str(tmp_path), times=99, beside=True)
    with start(APART, death, pool, lane_restarts=2) as run, pytest.raises(RunFailed) as caught:
        seen(run)
    assert str(caught.value).startswith("lane 1 was lost: the scorer was ended by SIGKILL\n")
    assert "started again 2 times" in str(caught.value)
    pool.restart(list(pool.lost))


def test_steps_that_overlap_are_taken_again_in_order(pool: LanePool, tmp_path: Path) -> None:
    def run_of(death: Death) -> list[Any]:
        chosen = Plan("custom", LANES, APART.placements, max_staleness=1, deadline_seconds=60.0)
        with start(chosen, death, pool) as run:
            results = list(run.steps(prompts(step) for step in range(STEPS)))
            return [(r.step, r.version, r.output["x"].tolist()) for r in results]

    death = Death("generate", 2, str(tmp_path))
    assert run_of(death) == run_of(Death())
    assert (tmp_path / "0").exists()


def test_rollouts_of_a_lost_step_are_not_made_again(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """They were kept on disk, all of them by the step's last `finish`; the next run on these lanes
    keeps nothing there."""
    folder = tmp_path / "journal"
    with start(APART, Death("finish", 1, str(tmp_path)), pool) as run:
        run.keep_rollouts(Journal(folder, 1 << 20))
        found = seen(run)
    assert found.figures == undisturbed
    assert [loss.lane for loss in run.losses] == [2]
    recalled = {step.step: step.recalled for step in found.steps if step.recalled}
    assert recalled == {1: ITEMS * SAMPLES}
    for file in folder.iterdir():
        file.unlink()
    with start(APART, Death(), pool) as run:
        assert seen(run).figures == undisturbed
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_processes_that_never_come_up_end_the_run(
    pool: LanePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(processes_module, "connect", refused)
    run = start(APART, Death("score", 1, str(tmp_path)), pool)
    with run, pytest.raises(RunFailed, match="not come up in 3 tries: nobody listens"):
        seen(run)
    monkeypatch.undo()
    pool.restart(list(pool.lost))


def test_a_lane_that_dies_again_and_again_ends_the_run(pool: LanePool, tmp_path: Path) -> None:
    death = Death("score", 1, str(tmp_path), times=99)
    with start(APART, death, pool, lane_restarts=2) as run, pytest.raises(RunFailed) as caught:
        seen(run)
    check_given_up(caught.value, tmp_path, pool)


def test_a_lane_that_dies_whenever_its_workers_load_ends_the_launch(
    pool: LanePool, tmp_path: Path
) -> None:
    death = Death("load", 0, str(tmp_path), times=99)
    with pytest.raises(RunFailed) as caught:
        start(APART, death, pool, lane_restarts=2)
    check_given_up(caught.value, tmp_path, pool, lane=0)


def check_given_up(error: RunFailed, folder: Path, pool: LanePool, lane: int = 1) -> None:
    assert len(list(folder.iterdir())) == 3
    first, second, *_ = str(error).splitlines()
    assert first.startswith(f"lane {lane} was lost: ")
    assert "started again 2 times, which is the most (`lane_restarts`)" in second
    with pytest.raises(RunFailed, match="no run can be started on these lanes"):
        start(APART, Death(), pool)
    pool.restart(list(pool.lost))


def test_a_lost_learner_that_is_not_saved_ends_the_run(pool: LanePool, tmp_path: Path) -> None:
    death = Death("train", 1, str(tmp_path))
    run = start(APART, death, pool, learner=Forgetful)
    with run, pytest.raises(RunFailed, match="there is no snapshot of what was learnt") as caught:
        seen(run)
    assert "learner does not say how its state is saved" in str(caught.value)
    assert "`--resume` goes on from the last checkpoint" in str(caught.value)
    pool.restart(list(pool.lost))


def test_a_run_that_is_to_end_brings_no_lane_back(pool: LanePool, tmp_path: Path) -> None:
    with start(APART, Death("score", 1, str(tmp_path)), pool) as run:
        run.may_heal = lambda: False
        with pytest.raises(RunFailed, match="lane 1 was lost"):
            seen(run)
        assert not run.losses
    pool.restart(list(pool.lost))
