"""A function of the user's in the place of an environment's reward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from m2flow.environments import Environment, Transition, make_environments
from m2flow.environments.registry import make_environment
from m2flow.errors import UserError

HERE = "tests.environments.test_rewarded"
POLE = "gymnasium:CartPole-v1"


def leaning(environment: Environment, did: Transition) -> float:
    return did.reward - abs(float(environment.observe()["state"][2]))


def told(environment: Environment, did: Transition) -> float:
    return float(environment.info["distance"]) if "distance" in environment.info else -1.0


def raises(environment: Environment, did: Transition) -> float:
    raise ZeroDivisionError


def too_many(environment: Environment, did: Transition, row: object) -> float:
    return 0.0


async def later(environment: Environment, did: Transition) -> float:
    return 0.0


class Later:
    async def __call__(self, environment: Environment, did: Transition) -> float:
        return 0.0


later_still = Later()


@pytest.mark.parametrize("processes", [0, 1])
def test_the_function_takes_the_place_of_the_reward(processes: int) -> None:
    options: dict[str, Any] = {"processes": processes}
    rewarded = make_environments(POLE, 2, reward_function=f"{HERE}:leaning", **options)
    plain = make_environments(POLE, 2)
    for environments in (rewarded, plain):
        environments.reset(None, [3, 4])
    action = torch.zeros(2, 3, 1, dtype=torch.int64)
    ours, own = rewarded.step(action), plain.step(action)
    assert torch.equal(ours.observation["state"], own.observation["state"])
    assert bool((ours.reward < own.reward).all())
    last = own.reward[:, -1] - own.observation["state"][:, 2].abs()
    assert torch.allclose(ours.reward[:, -1], last)
    rewarded.close()


def test_what_it_raises_costs_the_episode() -> None:
    environments = make_environments(POLE, 1, reward_function=f"{HERE}:raises")
    environments.reset(None, [0])
    assert bool(environments.step(torch.zeros(1, 1, 1, dtype=torch.int64)).failed[0])
    assert environments.failures["error"] == 1


def test_what_the_simulator_tells_is_there_for_it() -> None:
    environment = make_environment(POLE, reward_function=f"{HERE}:told")
    environment.reset(0, None)
    assert environment.step(np.zeros(1, np.float32)).reward == -1.0
    environment._inner.info = {"distance": 2.5}  # type: ignore[attr-defined]
    assert environment.info == {"distance": 2.5}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("leaning", r"environment\.reward: names no function.*module:function"),
        ("no_such_module:leaning", r"environment\.reward: there is no module no_such_module"),
        (f"{HERE}:leening", r"environment\.reward: .*has no leening.*leaning"),
        (f"{HERE}:too_many", r"environment\.reward: takes other arguments"),
        (f"{HERE}:later", r"environment\.reward: is a coroutine function"),
        (f"{HERE}:later_still", r"environment\.reward: is a coroutine function"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(path: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_environments(POLE, 1, processes=1, reward_function=path)
