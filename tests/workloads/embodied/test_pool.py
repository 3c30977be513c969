"""Rollouts and the environments that they get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from m2flow.environments import make_environments
from m2flow.workloads.embodied.workers.pool import EnvironmentPool


def test_a_rollout_takes_an_environment_that_had_its_task() -> None:
    made = []

    def make(count: int) -> Any:
        vector = make_environments("table:reach", count)
        states: dict[str, Any] = {
            "tasks": (("first", 10), ("second", 10)),
            "num_initial_states": 20,
        }
        vector.spec = replace(vector.spec, **states)
        made.append(vector)
        return vector

    def places(pool: EnvironmentPool, rollouts: list[int], states: list[int]) -> list[Any]:
        for _ in pool.begin(rollouts, [1] * len(rollouts), states):
            pass
        found = [pool._places[rollout] for rollout in rollouts]
        for rollout in rollouts:
            pool.release(rollout)
        return found

    pool = EnvironmentPool(make)
    assert places(pool, [0, 1, 2], [3, 12, 4]) == [(0, 0), (0, 1), (0, 2)]
    assert places(pool, [3, 4, 5], [15, 5, 6]) == [(0, 1), (0, 0), (0, 2)]
    assert places(pool, [6, 7], [11, 12]) == [(0, 1), (0, 0)], "the second has to change"
    assert len(made) == 1
    pool.close()


def test_rollouts_that_come_one_by_one_share_two_vectors() -> None:
    """Each vector of a lane that was lost had simulators in processes of its own."""
    made = []

    def make(count: int) -> Any:
        made.append(count)
        return make_environments("table:reach", count)

    pool = EnvironmentPool(make, 8)
    for rollout in range(10):
        list(pool.begin([rollout], [1], None))
    assert made == [1, 7, 1, 1], "more than were expected are made as they come"
    pool.close()


def test_episodes_that_nobody_goes_on_with_are_not_carried_over() -> None:
    """Between steps of training every rollout is over: replaying what was left took seconds."""
    restored = []

    def make(count: int) -> Any:
        vector = make_environments("table:reach", count)
        vector.restore = restored.append  # type: ignore[method-assign]
        return vector

    pool = EnvironmentPool(make)
    for running in (True, False):
        list(pool.begin([0, 1], [1, 2], None))
        if not running:
            pool.release_all()
        pool.put_away()
        pool.bring_back()
        assert bool(restored) == running
        restored.clear()
    pool.close()
