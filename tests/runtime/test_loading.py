"""Waiting for workers to load, with lanes that are played: progress, first errors, and the rest."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed, UserError
from m2flow.flow import Worker
from m2flow.runtime.driver import loading
from m2flow.runtime.lane.host import LaneHost
from m2flow.runtime.lane.loading import close_workers
from m2flow.runtime.lane.orders import FromLane, LaneEnded, Loaded, Loading

NUMBER = 7


class PlayedPool:
    """Lanes that say these things, each at its second."""

    def __init__(self, clock: list[float], *said: tuple[float, int, FromLane]) -> None:
        self.lanes = (LaneSpec(0), LaneSpec(1))
        self.clock, self.said = clock, sorted(said, key=lambda one: one[0])
        self.spoiled: str | None = None

    def receive(self, seconds: float) -> list[tuple[int, FromLane]]:
        if self.said and self.said[0][0] <= self.clock[0] + seconds:
            when, lane, message = self.said.pop(0)
            self.clock[0] = max(when, self.clock[0])
            return [(lane, message)]
        self.clock[0] += seconds
        return []

    def spoil(self, reason: str) -> None:
        self.spoiled = reason


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    return now


def failed(error: Exception, at: float) -> Loaded:
    return Loaded(NUMBER, {}, pickle.dumps(error), at)


def test_a_lane_that_makes_progress_may_take_longer_than_the_deadline(clock: list[float]) -> None:
    pool: Any = PlayedPool(
        clock,
        (1.0, 1, Loaded(NUMBER, {"b": 5})),
        *((90.0 * n, 0, Loading(NUMBER, f"w{n}")) for n in range(5)),
        (440.0, 0, Loaded(NUMBER, {"a": 9})),
    )
    assert loading._loaded(pool, NUMBER, 100.0) == {"a": 9, "b": 5}
    assert pool.spoiled is None


def test_a_lane_that_makes_none_is_named_with_its_worker(clock: list[float]) -> None:
    pool: Any = PlayedPool(
        clock, (1.0, 1, Loaded(NUMBER, {})), (2.0, 0, Loading(NUMBER, "learner"))
    )
    with pytest.raises(RunFailed, match=r"no progress with loading for 100 s: lane 0 \(learner\)"):
        loading._loaded(pool, NUMBER, 100.0)
    assert clock[0] == 102.0
    assert pool.spoiled is not None


def test_lanes_that_are_still_loading_are_waited_for_before_the_next_run(
    clock: list[float],
) -> None:
    """Or the workers of two runs would come up at once, and their collectives meet."""
    pool: Any = PlayedPool(
        clock, (1.0, 0, failed(FileNotFoundError("no model here"), 1.0)),
        (3.0, 1, Loaded(NUMBER, {})),
    )  # fmt: skip
    with pytest.raises(FileNotFoundError, match="no model here"):
        loading._loaded(pool, NUMBER, 100.0)
    assert clock[0] == 3.0
    assert pool.spoiled is None


def test_lanes_that_wait_for_one_that_failed_spoil_the_pool(clock: list[float]) -> None:
    pool: Any = PlayedPool(clock, (1.0, 0, failed(ValueError("wrong"), 1.0)))
    with pytest.raises(ValueError, match="wrong"):
        loading._loaded(pool, NUMBER, 100.0)
    assert clock[0] == 1.0 + loading.SETTLE_SECONDS
    assert pool.spoiled == "a run failed while it loaded: lane 1 (begins)"


def test_a_lane_that_is_lost_while_it_loads_is_the_cause(clock: list[float]) -> None:
    pool: Any = PlayedPool(clock, (1.0, 0, LaneEnded("killed by the kernel")))
    with pytest.raises(RunFailed, match="lane 0 was lost while it loaded: killed by the kernel"):
        loading._loaded(pool, NUMBER, 100.0)


@pytest.mark.parametrize("host", ["10.0.0.7", "8.8.8.8"])
def test_machines_that_meet_in_public_are_refused(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("M2FLOW_PRIVATE_NETWORK", raising=False)
    at = SimpleNamespace(host=host, meeting_port=7)
    pool: Any = SimpleNamespace(
        lanes=(LaneSpec(0), LaneSpec(1)), world=(), num_worlds=0, addresses={0: at, 1: at},
        positions=tuple, all_positions=(0, 1),
    )  # fmt: skip
    plan: Any = SimpleNamespace(deadline_seconds=1.0)
    order: Any = SimpleNamespace(lane_sets={(0, 1)}, number=NUMBER)
    if host.startswith("10."):
        assert loading._rendezvous(pool, plan, order).store == (host, 7)
        return
    with pytest.raises(UserError, match="M2FLOW_PRIVATE_NETWORK"):
        loading._rendezvous(pool, plan, order)


def test_workers_that_stay_stay_where_they_are() -> None:
    """What is put away is no resident of the lane, whoever else is closed."""
    host = LaneHost(0, {}, {"kept": Worker(), "gone": Worker()})
    host.away = {"kept", "gone"}
    assert close_workers(host, ["kept"]).away == {"kept"}
