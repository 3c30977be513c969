"""`RewardedEnvironment`: an environment whose reward is a function of the user's.

    def nearness(environment, did):
        return did.reward - distance(environment.info["hand"], environment.info["cube"])

The function is named by its dotted path, "my_module:nearness". It is asked after each step, given
the environment and what the step did, and its number takes the place of the environment's own. All
else, success and ends among it, stays the environment's. It must be pure. What it raises, or a
number that is not finite, costs the episode, as if the simulator had. No torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from m2flow.environments.environment import Array, Environment, Transition
from m2flow.errors import UserError
from m2flow.user_code import gives_coroutines, user_function

KEY = "environment.reward"

StepReward = Callable[[Environment, Transition], float]


class RewardedEnvironment(Environment):
    """See the module docstring.

    Args:
        inner: the environment.
        reward: the function.
    """

    def __init__(self, inner: Environment, reward: StepReward) -> None:
        self._inner, self._reward = inner, reward
        self.spec = replace(inner.spec)
        self.looks_back = inner.looks_back

    def __getattr__(self, name: str) -> Any:
        """What the environment has beside the protocol, such as an `expert`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def info(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The environment's own."""
        return self._inner.info

    def reset(self, seed: int, initial_state: int | None) -> None:
        self._inner.reset(seed, initial_state)

    def step(self, action: Array) -> Transition:
        did = self._inner.step(action)
        return did._replace(reward=float(self._reward(self._inner, did)))

    def observe(self) -> Mapping[str, Array]:
        return self._inner.observe()

    def instruction(self) -> str:
        return self._inner.instruction()

    def render(self) -> Array:
        return self._inner.render()

    def state(self) -> Any:
        return self._inner.state()

    def restore(self, state: Any) -> None:
        self._inner.restore(state)

    def close(self) -> None:
        self._inner.close()


def reward_at(path: str) -> StepReward:
    """The function of that dotted path.

    Raises:
        UserError: there is no such function, or it does not take two arguments.
    """
    function = user_function(path, KEY)
    expected = "def reward(environment, transition) -> float"
    if gives_coroutines(function):
        raise UserError("is a coroutine function", key=KEY, value=path, expected=expected)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UserError(
            "takes other arguments",
            key=KEY,
            value=path,
            expected=expected,
        ) from error
    rewarding: StepReward = function
    return rewarding
