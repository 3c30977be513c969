"""A stall says who waits for whom, and what every lane was doing and had printed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import RunFailed, Stalled
from m2flow.runtime.driver import stalled
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

LANES = tuple(LaneSpec(number) for number in range(2))


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with local_cluster(len(LANES)):
        yield


class Sleeper(Worker):
    @stage
    def fall_asleep(self, batch: Batch) -> Batch:
        time.sleep(120)
        return batch


class Waiter(Worker):
    def __init__(self, stop: bool) -> None:
        self.stop = stop

    @stage
    def wait(self, batch: Batch) -> Batch:
        if self.stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        return batch


class Stalling(Flow):
    sleeper: Sleeper
    waiter: Waiter

    def step(self, items: Stream) -> Stream:
        return self.waiter.wait(self.sleeper.fall_asleep(items), self.waiter.wait(items))


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in, which is to be asked for stacks of a process that goes on being stopped."""
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "stacks by py-spy $*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.usefixtures("py_spy")
def test_a_stall_shows_the_stacks_of_the_lanes(stop: bool) -> None:
    spots = {"sleeper": Placement(((0,),)), "waiter": Placement(((1,),))}
    plan = Plan("custom", LANES, spots, deadline_seconds=2.0)
    flow = Stalling(sleeper=Sleeper(), waiter=Waiter(stop))
    with m2flow.launch(flow, items_per_step=2, plan=plan) as run:
        with pytest.raises(RunFailed) as caught:
            run.step(Batch({"x": [1, 2]}))
        stopped = run._carrier.pool.addresses[1].process_id
        if stop:
            os.kill(stopped, signal.SIGCONT)
    assert "has not finished within its deadline of 2 s" in str(caught.value)
    assert caught.value.__cause__ is not None
    first, second = caught.value.__cause__.__notes__
    assert first.startswith("Lane 0, process ")
    assert "in fall_asleep" in first
    assert second.startswith(f"Lane 1, process {stopped}:")
    if stop:
        assert "no answer; its state is T (stopped)" in second
        assert f"    stacks by py-spy dump --nonblocking --pid {stopped}" in second
    else:
        assert "Thread 0x" in second


def test_the_last_lines_that_a_lane_has_printed(tmp_path: Path) -> None:
    (tmp_path / "worker-abc-77.out").write_text("".join(f"line {n}\n" for n in range(500)))
    (tmp_path / "worker-abc-77.err").write_text("")
    (tmp_path / "worker-abc-78.out").write_text("another's\n")
    head, *lines = stalled._printed(tmp_path, 77)
    assert head == "  the last of worker-abc-77.out:"
    assert lines == [f"    line {n}" for n in range(300, 500)]
    assert list(stalled._printed(None, 77)) == []


def test_a_stage_that_says_it_ran_out_of_time_has_not_stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lane has answered and runs on: nobody may write the stacks of threads that run."""
    monkeypatch.setattr(stalled, "accounts", lambda pool: ["what lanes do"])
    for cause, told in ((TimeoutError("a judge is late"), 0), (Stalled("no sign of life"), 1)):
        error = RunFailed("the step failed")
        error.__cause__ = cause
        stalled.explain(error, None)  # type: ignore[arg-type]
        assert len(getattr(cause, "__notes__", ())) == told
