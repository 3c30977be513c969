"""An environment that is quick and easily learned, with every way in which an episode can end."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import numpy as np

from m2flow.environments import Environment, Transition
from m2flow.environments.environment import Array
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec


class Counting(Environment):
    """Choose the side on which a number lies: right is 1, wrong 0; solved by six right ones.

    Args:
        length: steps of an episode, after which it is truncated.
        stops: a wrong choice terminates.
        fails_at: the simulator raises at this step of episodes whose seed is even; 0 for never.
        fails_always: of odd ones as well.
        dies_at: its process kills itself at the beginning of so many episodes; once, for which it
            leaves the file `dead`.
    """

    begun: ClassVar[int] = 0

    def __init__(
        self,
        length: int = 8,
        stops: bool = False,
        fails_at: int = 0,
        dies_at: int = 0,
        dead: str = "",
        fails_always: bool = False,
    ) -> None:
        self._length, self._stops, self._fails_at = length, stops, fails_at
        self._fails_always = fails_always
        self._dies_at, self._dead = dies_at, Path(dead)
        self.spec = EnvironmentSpec(
            "counting", 1, (ObservationSpec("state", (2,)),), ActionSpec.discrete(2), length
        )

    def reset(self, seed: int, initial_state: int | None) -> None:
        self._seed = seed
        self._random = np.random.default_rng(seed if initial_state is None else initial_state)
        self._taken = self._right = 0
        self._draw()
        Counting.begun += 1
        if Counting.begun == self._dies_at:
            with suppress(FileExistsError):
                self._dead.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    def _draw(self) -> None:
        self._number = float(self._random.uniform(-1, 1))

    def step(self, action: Array) -> Transition:
        self._taken += 1
        fails = self._fails_always or self._seed % 2 == 0
        if fails and self._taken == self._fails_at > 0:
            raise RuntimeError("the simulator broke")
        right = (action[0] > 0.5) == (self._number > 0)
        self._right += right
        self._draw()
        return Transition(
            float(right), terminated=self._stops and not right, success=self._right >= 6
        )

    def observe(self) -> Mapping[str, Array]:
        return {"state": np.array([self._number, self._taken / self._length], np.float32)}

    def render(self) -> Array:
        return np.zeros((8, 8, 3), np.uint8)
