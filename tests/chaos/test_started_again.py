"""Processes that take the place of lost lanes: spare ones, early ones, and ones that end at once.

The flow is the one of `dying_workers`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from m2flow.runtime.driver import moving
from m2flow.runtime.driver import processes as processes_module
from m2flow.runtime.driver.placing import nodes_for
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.spares import Spares
from tests.chaos.dying_workers import APART, LANES, Death, seen, start

ray = pytest.importorskip("ray")


def test_a_spare_process_takes_the_place_of_a_lane(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that comes back is the process that has waited, and another one waits then."""
    with monkeypatch.context() as patch:
        processes = pool.processes
        patch.setattr(processes, "spares", spares := Spares(1, processes.make_spare))
        spares.keep(LANES, nodes_for(LANES))
        (actor,) = spares.actors
        ray.get(actor.warm.remote([]), timeout=60.0)
        with start(APART, Death("score", 1, str(tmp_path)), pool) as run:
            found = seen(run)
        (other,) = spares.actors
        spares.end()
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert pool.processes.actors[loss.lane] == actor
    assert other != actor


def test_a_process_for_a_lane_starts_while_the_other_lanes_stop(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    before: list[Any] = []
    processes, stop = pool.processes, moving.stopped

    def make(*arguments: Any) -> Any:
        made.append(make_one(*arguments))
        return made[-1]

    def stopped(*arguments: Any) -> set[int]:
        before.extend(made)
        return stop(*arguments)

    make_one = processes._make
    monkeypatch.setattr(processes, "_make", make)
    monkeypatch.setattr(moving, "stopped", stopped)
    with start(APART, Death("train", 1, str(tmp_path)), pool) as run:
        found = seen(run)
    assert found.figures == undisturbed
    (started,) = before
    assert started in processes.actors.values()
    assert not processes.spares.actors, "no process is left that waits"


def test_two_losses_in_a_row_both_take_a_spare_process(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before it has done its imports: no other process is started beside it."""
    made: list[Any] = []
    processes = pool.processes

    def make(*arguments: Any) -> Any:
        made.append(make_one(*arguments))
        return made[-1]

    make_one = processes._make
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_make", make)
        patch.setattr(processes, "spares", spares := Spares(1, processes.make_spare))
        spares.keep(LANES, nodes_for(LANES))
        with start(APART, Death("score", 1, str(tmp_path), times=2), pool) as run:
            found = seen(run)
        waiting = spares.actors
        spares.end()
    assert found.figures == undisturbed
    first, second = run.losses
    assert first.lane == second.lane
    assert made[1:] == [processes.actors[first.lane], *waiting]


def test_a_process_that_ends_before_its_lane_is_up_is_started_again(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said where it can be reached, and is killed before anybody has."""
    victims: list[int] = []
    connect = processes_module.connect

    def killed_first(address: Any, key: bytes, **options: Any) -> Any:
        if not victims:
            (lane,) = (x for x in pool.addresses.values() if x.line == address)
            victims.append(lane.process_id)
            os.kill(lane.process_id, signal.SIGKILL)
            while process_is_there(lane.process_id):
                time.sleep(0.01)
        return connect(address, key, **options)

    monkeypatch.setattr(processes_module, "connect", killed_first)
    with start(APART, Death("score", 1, str(tmp_path)), pool) as run:
        found = seen(run)
    assert victims
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert pool.addresses[loss.lane].process_id != victims[0]


def process_is_there(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
