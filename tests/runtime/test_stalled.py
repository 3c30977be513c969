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
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import RunFailed, Stalled
from m2flow.runtime.driver import stalled
from m2flow.runtime.driver.pool import LanePool
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

NOBODY = 2**22 + 1
"""More than the number of any process."""

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


class Dozer(Worker):
    """Falls asleep beside the steps."""

    def __init__(self, when: str) -> None:
        self.when = when

    def load(self, place: Place) -> None:
        super().load(place)
        self.doze("load")

    @stage
    def answer(self, batch: Batch) -> Batch:
        self.doze("evaluate")
        return batch

    def doze(self, moment: str) -> None:
        if moment == self.when:
            time.sleep(120)


class Dozing(Flow):
    dozer: Dozer

    def step(self, items: Stream) -> Stream:
        return self.dozer.answer(items)

    def evaluate(self, items: Stream) -> Stream:
        return self.dozer.answer(items)


class Waiter(Worker):
    def __init__(self, stop: bool) -> None:
        self.stop = stop

    @stage
    def wait(self, batch: Batch, *_: Batch) -> Batch:
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


def doze_beside_the_steps(moment: str) -> None:
    flow = Dozing(dozer=Dozer(moment))
    plan = Plan("custom", LANES, {"dozer": Placement(((1,),))}, deadline_seconds=2.0)
    given = {"plan": plan, "items_per_step": 2, "also": {"evaluate": 2}}
    with m2flow.launch(flow, **given, load_deadline_seconds=2.0) as run:
        run.run_method("evaluate", Batch({"x": [1, 2]}))
        run.worker_call("dozer", "doze", moment)


@pytest.mark.parametrize("moment", ["load", "evaluate", "save"])
def test_a_stall_beside_the_steps_shows_the_stacks_of_the_lanes(moment: str) -> None:
    with pytest.raises(RunFailed) as caught:
        doze_beside_the_steps(moment)
    if moment == "save":
        assert str(caught.value) == "lanes [1] have not answered within 2 s"
    assert isinstance(caught.value.__cause__, Stalled)
    _, second = caught.value.__cause__.__notes__
    assert second.startswith("Lane 1, process ")
    assert "in doze" in second


def test_lanes_of_another_machine_are_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a task of Ray on their machine."""
    monkeypatch.setattr(LanePool, "is_here", lambda *_: False)
    with LanePool(LANES) as pool:
        for address in pool.addresses.values():
            with Path(f"/proc/{address.process_id}/fd/1").resolve().open("a") as log:
                log.write("what a lane has printed\n")
        told = stalled.accounts(pool)
        assert [one.splitlines()[0] for one in told] == [
            f"Lane {lane}, process {address.process_id}:"
            for lane, address in pool.addresses.items()
        ]
        for one in told:
            assert "Thread 0x" in one
            printed = one.partition("  the last of worker-")[2].splitlines()
            assert "    what a lane has printed" in printed


def test_the_last_lines_that_a_lane_has_printed(tmp_path: Path) -> None:
    (tmp_path / f"worker-abc-{NOBODY}.out").write_text("".join(f"line {n}\n" for n in range(500)))
    (tmp_path / f"worker-abc-{NOBODY}.err").write_text("")
    (tmp_path / "worker-abc-78.out").write_text("another's\n")
    head, *lines = stalled._printed(tmp_path, NOBODY)
    assert head == f"  the last of worker-abc-{NOBODY}.out:"
    assert lines == [f"    line {n}" for n in range(300, 500)]
    assert list(stalled._printed(None, NOBODY)) == []


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
