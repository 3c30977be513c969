"""The table, which writes down what was seen and done: one line for each step of an episode."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from m2flow.environments import Transition
from m2flow.environments.environment import Array
from m2flow.environments.table import TableEnvironment


class LoggedTable(TableEnvironment):
    """The task "red".

    Args:
        log: file that a line is appended to: seed, step, hashes of the picture and of the action.
        options: of the table.
    """

    def __init__(self, log: str, **options: Any) -> None:
        super().__init__("red", **options)
        self._log = Path(log)

    def reset(self, seed: int, initial_state: int | None) -> None:
        super().reset(seed, initial_state)
        self._seed, self._taken = seed, 0

    def step(self, action: Array) -> Transition:
        hashes = (sha256(one.tobytes()).hexdigest() for one in (self.observe()["image"], action))
        with self._log.open("a") as file:
            file.write(f"{self._seed} {self._taken} {' '.join(hashes)}\n")
        self._taken += 1
        return super().step(action)
