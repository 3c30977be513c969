"""Environments stepped one after the other in this very process: for debugging and light ones.

What a simulator raises costs an episode here too, but one that hangs or ends the process takes
everything with it: see `processes.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from m2flow.environments.environment import Environment
from m2flow.environments.protocol import Observations, VectorEnvironment, gather
from m2flow.environments.slots import Failure, Slots, Steps, stack_pictures


class SerialEnvironments(VectorEnvironment):
    """`num_envs` environments made by `make`; see the module docstring."""

    def __init__(self, make: Callable[[], Environment], num_envs: int) -> None:
        self._slots = Slots(make, num_envs)
        super().__init__(self._slots.spec)

    @property
    def nbytes(self) -> int:
        """Of the observations; what a simulator takes in this very process cannot be told."""
        return sum(rows.nbytes for rows in self._slots.memory.values())

    def render(self, ids: Sequence[int] | None = None) -> Tensor:
        pictures = self._slots.render(self._chosen(ids))
        self._note(self._failures())
        return torch.from_numpy(stack_pictures(pictures))

    def state(self) -> bytes:
        return pickle.dumps(self._slots.state())

    def restore(self, state: bytes) -> None:
        self._slots.restore(pickle.loads(state))
        self._note(self._failures())

    def close(self) -> None:
        self._slots.close()

    def _reset(
        self, ids: Sequence[int], seeds: Sequence[int], initial_states: Sequence[int | None]
    ) -> Sequence[Failure]:
        self._slots.reset(ids, seeds, initial_states)
        return self._failures()

    def _step(self, ids: Sequence[int], action_BKA: Any) -> tuple[Steps, Sequence[Failure]]:
        return Steps.of(self._slots.step(ids, action_BKA)), self._failures()

    def _observe(self, ids: Sequence[int]) -> Observations:
        instructions = self._slots.instructions if self.spec.instructions is not None else None
        return gather(self._slots.memory, instructions, ids, copy=True)

    def _failures(self) -> list[Failure]:
        """The failures since the last call."""
        failures, self._slots.new_failures = self._slots.new_failures, []
        return failures
