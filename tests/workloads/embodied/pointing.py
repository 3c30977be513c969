"""A control task that a small policy learns in a minute: bring a point on a line to the middle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from m2flow.environments import Environment, Transition
from m2flow.environments.environment import Array
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec


class Pointing(Environment):
    """Actions in [-2, 2] move the point by a tenth; the reward is minus its distance.

    Args:
        length: steps of an episode, after which it is truncated.
        falls: where the point leaves [-1, 1] the episode terminates.
        bounded: whether the environment bounds its actions.
    """

    def __init__(self, length: int = 8, falls: bool = False, bounded: bool = True) -> None:
        self._falls = falls
        most = 2.0 if bounded else float("inf")
        self.spec = EnvironmentSpec(
            "pointing",
            1,
            (ObservationSpec("state", (2,)),),
            ActionSpec(1, (-most,), (most,)),
            length,
        )

    def reset(self, seed: int, initial_state: int | None) -> None:
        self._at = float(np.random.default_rng(seed).uniform(-1, 1))
        self._taken = 0

    def step(self, action: Array) -> Transition:
        self._at += 0.1 * float(action[0])
        self._taken += 1
        fell = self._falls and abs(self._at) > 1
        return Transition(-abs(self._at), terminated=fell, success=abs(self._at) < 0.1)

    def observe(self) -> Mapping[str, Array]:
        return {"state": np.array([self._at, 0.1 * self._taken], np.float32)}
