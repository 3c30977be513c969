"""The table: its expert solves it, and who does not read the sentence does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from m2flow.environments.registry import make_environment
from m2flow.environments.table import TableEnvironment
from m2flow.errors import UserError

EPISODES = 60


def solved(act: Any, task: str = "reach") -> float:
    """The share of episodes in which the task was solved at the end."""
    environment, count = make_environment(f"table:{task}"), 0
    for seed in range(EPISODES):
        environment.reset(seed, None)
        for _ in range(environment.spec.max_episode_steps or 0):
            step = environment.step(act(environment))
            if step.terminated:
                count += step.success
                break
    return count / EPISODES


def to_red(environment: Any) -> Any:
    """Where the expert would go if the red ball were asked for."""
    asked, environment._asked = environment._asked, 0
    action = environment.expert()
    environment._asked = asked
    return action


@pytest.mark.parametrize("task", ["reach", "around"])
def test_the_expert_solves_it(task: str) -> None:
    assert solved(lambda one: one.expert(), task) > 0.95


def test_who_does_not_read_the_sentence_solves_a_quarter() -> None:
    assert solved(to_red) < 0.45
    assert solved(to_red, "around") < 0.45
    assert solved(to_red, "red") > 0.95


def test_the_picture_shows_where_things_are() -> None:
    environment = make_environment("table:reach", pixels=32, privileged=True)
    environment.reset(3, None)
    seen = environment.observe()
    assert seen["image"].shape == (32, 32, 3)
    places = seen["state"][2:].reshape(4, 2)
    for (x, y), colour in zip(places, ([220, 50, 47], [70, 160, 60]), strict=False):
        column, row = (int((at + 1) / 2 * 32) for at in (x, y))
        assert seen["image"][row, column].tolist() == colour


@pytest.mark.parametrize("state", [None, 7])
def test_an_episode_follows_from_its_seed(state: int | None) -> None:
    first, second = (make_environment("table:reach") for _ in range(2))
    first.reset(5, state)
    second.reset(5 if state is None else 6, state)
    np.testing.assert_array_equal(first.observe()["image"], second.observe()["image"])
    assert first.instruction() == second.instruction()


@pytest.mark.parametrize("pace", [(), (0.5,), (0.9, 0.2), (0.0, 0.5), (0.5, 1.5)])
def test_a_pace_that_is_none_is_refused(pace: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=r"environment\.options\.pace"):
        TableEnvironment("around", pace=pace)
