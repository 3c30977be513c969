"""Snapshots beside the steps: when they are taken, what waits for them, and one that fails.

The flow is the one of `dying_workers`.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow import Batch, stage
from m2flow.runtime.driver import recovery
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import Recovery
from tests.chaos.dying_workers import (
    APART,
    ITEMS,
    STEPS,
    Death,
    Judge,
    Learner,
    prompts,
    seen,
    start,
)

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module


class HeldJudge(Judge):
    """Gives the second step's points when the file "paused" is there, and not before."""

    def __init__(self, death: Death) -> None:
        super().__init__(death)
        self.file = Path(death.folder) / "paused"

    @stage
    def score(self, batch: Batch) -> Batch:
        deadline = time.monotonic() + 30
        while int(batch["x"].min()) // ITEMS == 1 and not self.file.exists():
            assert time.monotonic() < deadline, "nobody has paused"
            time.sleep(0.01)
        return super().score(batch)


@pytest.mark.parametrize("staleness", [0, 1])
def test_steps_wait_for_a_snapshot_only_where_they_overlap(
    staleness: int,
    pool: LanePool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[Any],
) -> None:
    noted: list[str] = []

    def noting(name: str) -> None:
        method = getattr(Recovery, name)

        def note(self: Recovery, *args: Any) -> None:
            noted.append(name)
            if name == "pause":
                (tmp_path / "paused").touch()
            method(self, *args)

        monkeypatch.setattr(Recovery, name, note)

    monkeypatch.setattr(recovery, "SHARE", math.inf)
    for name in ("pause", "begin", "keep"):
        noting(name)
    chosen, death = replace(APART, max_staleness=staleness), Death(folder=str(tmp_path))
    # the second step is in flight when the first one's result is given
    with start(chosen, death, pool, judge=HeldJudge if staleness else Judge) as run:
        for result in run.steps(prompts(step) for step in range(STEPS)):
            assert run.worker_call("learner", "state") >= 0
            assert staleness or result.metrics == undisturbed[4 + result.step][2]
    assert noted.count("begin") >= 1
    assert noted.count("keep") == noted.count("begin")
    assert ("pause" in noted) is bool(staleness)


def test_lanes_save_while_weights_go_out_and_the_result_is_on_its_way(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch, undisturbed: list[Any]
) -> None:
    begun: list[tuple[int, int]] = []
    begin = Recovery.begin

    def noted(self: Recovery, step: int) -> None:
        begun.append((step, self.given))
        begin(self, step)

    monkeypatch.setattr(recovery, "BUSY", math.inf)
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    monkeypatch.setattr(Recovery, "begin", noted)
    with start(APART, Death(), pool) as run:
        results = list(run.steps(prompts(step) for step in range(STEPS)))
    assert [result.metrics for result in results] == [figures[2] for figures in undisturbed[4:]]
    assert begun == [(step + 1, step) for step in range(STEPS)]


def test_a_snapshot_is_taken_while_the_result_of_its_step_is_looked_at(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch, undisturbed: list[Any]
) -> None:
    """A learner that is lost then has nothing to take again."""
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    with start(APART, Death(), pool) as run:
        results = run.steps(prompts(step) for step in range(STEPS))
        steps = [next(results)]
        run.worker_call("learner", "state")  # waits for it
        os.kill(pool.addresses[2].process_id, signal.SIGKILL)
        steps += results
    assert [result.metrics for result in steps] == [figures[2] for figures in undisturbed[4:]]
    (loss,) = run.losses
    assert loss.steps == 0


def test_a_snapshot_is_taken_after_so_many_steps_at_the_latest(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = Recovery.begin

    def noted(self: Recovery, step: int) -> None:
        begun.append(step)
        begin(self, step)

    monkeypatch.setattr(Recovery, "begin", noted)
    for name in ("SHARE", "BUSY"):
        monkeypatch.setattr(recovery, name, 1e-9)  # it would never be worth its time again
    with start(APART, Death(), pool, snapshot_every=2) as run:
        assert len(list(run.steps(prompts(step) for step in range(STEPS)))) == STEPS
    assert begun == [1, 3], "nothing was known of what the first one takes"


@pytest.mark.timeout(60)
def test_whoever_asks_a_worker_waits_for_no_snapshot_behind_results_still_to_be_taken(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    monkeypatch.setattr(Recovery, "can_keep", False)
    with start(APART, Death(), pool) as run:
        states = [
            run.worker_call("learner", "state")
            for _ in run.steps(prompts(step) for step in range(STEPS))
        ]
    assert len(states) == STEPS


class Cramped(Learner):
    """Has no memory for its first copy."""

    tried = False

    def save(self) -> dict[str, torch.Tensor]:
        if not self.tried:
            self.tried = True
            raise torch.OutOfMemoryError("no room for 7 GB")
        return super().save()


def test_a_snapshot_that_runs_out_of_memory_ends_no_run(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch, undisturbed: list[Any]
) -> None:
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    with start(APART, Death(), pool, learner=Cramped) as run:
        found = seen(run)
    assert found.figures == undisturbed
    notes = [note for step in found.steps for note in step.notes]
    assert any("the last one has failed: " in note and "7 GB" in note for note in notes), notes


class Overdue(Exception):
    """The time to stop has passed."""


def test_steps_that_are_taken_again_cannot_be_given_up(
    pool: LanePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state from between them would be kept as that of the step whose result is given next."""
    for name in ("SHARE", "BUSY"):
        monkeypatch.setattr(recovery, name, 1e-9)  # no snapshot after the first one

    with start(APART, Death("train", 2, str(tmp_path)), pool) as run:

        def heed() -> None:
            step = run._runners["step"]
            if step.busy and step.first_open[0] < run._recovery.given:
                raise Overdue

        run.heed = heed
        with pytest.raises(Overdue):
            list(run.steps(prompts(step) for step in range(STEPS)))
        assert not run.give_up(run._recovery.given, 10.0)
    assert (tmp_path / "0").exists(), "nobody was killed"


class Unhurried(Learner):
    """Has not saved when the step's result is given."""

    def save(self) -> dict[str, torch.Tensor]:
        time.sleep(1.0)
        return super().save()


def test_after_a_snapshot_that_nobody_listened_for_others_are_taken(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was away between two steps for longer than a call may take had none ever after."""
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    monkeypatch.setattr(recovery, "BUSY", math.inf)
    chosen = replace(APART, deadline_seconds=3.0)
    with start(chosen, Death(), pool, learner=Unhurried) as run:
        for result in run.steps(prompts(step) for step in range(STEPS)):
            if result.step == 0:
                time.sleep(4.0)
        assert run._recovery.warning is None
