"""`Labour`: an environment whose step computes for a while; lanes import it by name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from m2flow.environments import Environment, Transition
from m2flow.environments.environment import Array
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec

SIDE = 128
"""Of the matrices that an environment multiplies."""


class Labour(Environment):
    """Guess signs that it takes `rounds` products of matrices to find out.

    Args:
        rounds: products of a step, 4 million operations each.
        length: steps of an episode.
    """

    def __init__(self, rounds: int = 1, length: int = 16) -> None:
        self._rounds, self._length = rounds, length
        self._mixing = np.linalg.qr(np.random.default_rng(0).normal(size=(SIDE, SIDE)))[0]
        self.spec = EnvironmentSpec(
            "labour:Labour",
            1,
            (ObservationSpec("state", (8,)),),
            ActionSpec(2, (-1.0, -1.0), (1.0, 1.0)),
            max_episode_steps=length,
            restores="saved",
        )

    def reset(self, seed: int, initial_state: int | None) -> None:
        random = np.random.default_rng(seed if initial_state is None else initial_state)
        self._field = random.normal(size=(SIDE, SIDE))

    def step(self, action: Array) -> Transition:
        reward = float(((self._field[0, :2] > 0) == (action > 0)).mean())
        for _ in range(self._rounds):
            self._field = self._mixing @ self._field
        return Transition(reward, success=reward > 0.9)

    def observe(self) -> Mapping[str, Array]:
        return {"state": np.tanh(self._field[0, :8]).astype(np.float32)}

    def state(self) -> Array:
        return self._field

    def restore(self, state: Array) -> None:
        self._field = state
