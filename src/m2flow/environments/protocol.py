"""`VectorEnvironment`: several equal environments behind one set of calls.

Every call may concern only some of the environments, so that groups of them can take turns with a
policy. Episodes begin by `reset`; what happens in one follows from its seed, its initial state and
its actions alone. An environment whose episode had to be given up (its simulator was lost, hung,
raised, or gave figures that are not finite) answers `failed` until it is reset; `failures` counts
such episodes by cause. Whoever drives the environments discards them and goes on.

Observations are a mapping from names to tensors [B, ...]: "state" float32, "image" uint8
[B, H, W, 3], and "instruction", a list of B sentences, where the environment has language.

Legend: B environments concerned, K actions of a chunk, A figures of an action.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from m2flow.environments.slots import Failure, Steps
from m2flow.environments.spec import EnvironmentSpec
from m2flow.errors import RunFailed

Observations: TypeAlias = dict[str, Any]

MAX_FAILURES_IN_A_ROW = 10
"""Episodes that one environment may fail, with none ended between them, before the run stops."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a chunk of actions did in each environment concerned.

    Attributes:
        observation: after the chunk; zeros where `failed`.
        reward: float32 [B, K]; 0 behind the end of an episode.
        terminated: bool [B]; the episode has come to its own end.
        truncated: bool [B]; it was cut off, by a limit of steps for one. Never both.
        success: bool [B]; the task stands solved after the last step taken.
        success_once: bool [B]; it stood solved after any step of this chunk.
        steps: int64 [B]; steps taken, fewer than K where the episode ended.
        failed: bool [B]; the episode is given up: discard it.
    """

    observation: Observations
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor
    success_once: Tensor
    steps: Tensor
    failed: Tensor

    @classmethod
    def none(cls, observation: Observations, rows: int, chunk: int) -> StepOutcome:
        """That of rows without an episode: no step is taken, and all are `failed`."""
        nothing = Steps.nothing(rows, chunk)
        nothing.failed[:] = True
        columns = {name: torch.from_numpy(part) for name, part in nothing._asdict().items()}
        return cls(observation=observation, **columns)

    @property
    def done(self) -> Tensor:
        """Bool [B]: no step may follow without a reset."""
        return self.terminated | self.truncated | self.failed


class VectorEnvironment(ABC):
    """Equal environments; see the module docstring.

    A subclass says how to reset, step and observe; chunks and the counting of failures are here.

    Args:
        spec: of all of them.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self.failures: Counter[str] = Counter()
        self._failures_in_a_row = [0] * spec.num_envs
        self._has_stepped = [False] * spec.num_envs
        self._detail: str | None = None

    def reset(
        self,
        ids: Sequence[int] | None,
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
    ) -> Observations:
        """Begin an episode in each of the environments.

        Args:
            ids: which environments; None for all.
            seeds: one for each of them.
            initial_states: numbers of the states to begin with, or None: the seeds decide. Where
                the environment has no list of states, a number stands for the state that it yields
                as a seed.

        Returns:
            their first observations; zeros where an episode could not be begun, and the next step
            there says `failed`.

        Raises:
            UserError: a number of an initial state that does not exist.
            RunFailed: an environment failed too often in succession.
        """
        chosen = self._chosen(ids)
        states: Sequence[int | None] = initial_states or [None] * len(chosen)
        if len(seeds) != len(chosen) or len(states) != len(chosen):
            raise ValueError(f"{len(chosen)} environments need as many seeds and initial states")
        for slot in chosen:
            if self._has_stepped[slot]:  # its last episode has not failed, however it ended
                self._failures_in_a_row[slot] = 0
                self._has_stepped[slot] = False
        self._note(self._reset(chosen, seeds, states))
        return self._observe(chosen)

    def step(self, actions: Tensor, ids: Sequence[int] | None = None) -> StepOutcome:
        """Carry out a chunk of actions in each environment, up to the end of its episode.

        Args:
            actions: [B, K, A], within the bounds of the spec.
            ids: the B environments; None for all.

        Raises:
            UserError: the actions do not fit the environment.
            ValueError: an episode is over, and was not reset.
            RunFailed: an environment failed too often in succession.
        """
        return self.begin_step(actions, ids)()

    def begin_step(
        self, actions: Tensor, ids: Sequence[int] | None = None
    ) -> Callable[[], StepOutcome]:
        """Begin a step that goes on beside the caller where simulators have their own processes.

        Args and errors are those of `step`. Steps of different environments may be begun before
        the first is ended. Simulators in this process carry a step out as it is ended; those in
        processes begin at once, and whatever else is called waits for all that were begun.

        Returns:
            what ends the step: to be called once, and gives the outcome.
        """
        chosen = self._chosen(ids)
        action_BKA = actions.detach().to("cpu", torch.float32).numpy()
        if len(action_BKA) != len(chosen):
            raise ValueError(f"{len(chosen)} environments, and actions for {len(action_BKA)}")
        self.spec.action.check(action_BKA, whole=not actions.is_floating_point())
        end = self._begin_step(chosen, self.spec.action.within(action_BKA))
        return lambda: self._outcome(chosen, *end())

    def _outcome(
        self, chosen: list[int], result: Steps, failures: Sequence[Failure]
    ) -> StepOutcome:
        """What environments answer to a step."""
        for row in np.flatnonzero(~result.failed):
            self._has_stepped[chosen[row]] = True
        self._note(failures)
        return StepOutcome(
            observation=self._observe(chosen),
            **{name: torch.from_numpy(column) for name, column in result._asdict().items()},
        )

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes that run the simulators; none where they are in this one."""
        return []

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that ending the simulators gives back, as far as it can be told."""

    @abstractmethod
    def render(self, ids: Sequence[int] | None = None) -> Tensor:
        """Pictures for people, uint8 [B, H, W, 3]."""

    @abstractmethod
    def state(self) -> bytes:
        """All running episodes, for `restore` in this or another host of the same environment."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Carry on the episodes of `state`; what `spec.restores` says is how."""

    @abstractmethod
    def close(self) -> None:
        """End the simulators. Calling it again does nothing."""

    @abstractmethod
    def _reset(
        self, ids: Sequence[int], seeds: Sequence[int], initial_states: Sequence[int | None]
    ) -> Sequence[Failure]:
        """Begin the episodes; those that could not be."""

    @abstractmethod
    def _step(self, ids: Sequence[int], action_BKA: Any) -> tuple[Steps, Sequence[Failure]]:
        """Carry out the actions; what they did, and the episodes that were given up."""

    def _begin_step(
        self, ids: Sequence[int], action_BKA: Any
    ) -> Callable[[], tuple[Steps, Sequence[Failure]]]:
        """Begin to carry out the actions; what ends that, and says what `_step` says."""
        return lambda: self._step(ids, action_BKA)

    @abstractmethod
    def _observe(self, ids: Sequence[int]) -> Observations:
        """The last observations."""

    def _chosen(self, ids: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.spec.num_envs)) if ids is None else [int(index) for index in ids]
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(self.spec.num_envs)):
            raise ValueError(f"{chosen} are not different ones of {self.spec.num_envs}")
        return chosen

    def _note(self, failures: Sequence[Failure]) -> None:
        """Count episodes that were given up, and stop where an environment never works."""
        for failure in failures:
            self.failures[failure.cause] += 1
            self._failures_in_a_row[failure.slot] += 1
            self._has_stepped[failure.slot] = False
            what = f"{self.spec.name}: environment {failure.slot} failed ({failure.cause})"
            detail = failure.detail.strip()
            last_line = detail.rpartition("\n")[2]
            shown = f"{last_line} (as before)" if detail and detail == self._detail else detail
            self._detail = detail
            _log.warning("%s; its episode is discarded: %s", what, shown)
            if self._failures_in_a_row[failure.slot] >= MAX_FAILURES_IN_A_ROW:
                times = f"{MAX_FAILURES_IN_A_ROW} times in a row; the last time:"
                raise RunFailed(f"{what} {times}\n{failure.detail}")


def gather(
    memory: dict[str, Any], instructions: Sequence[str] | None, ids: Sequence[int], *, copy: bool
) -> Observations:
    """The rows of some environments, from memory for all of them.

    Args:
        memory: name to array [num_envs, ...].
        instructions: of all environments; None where there is no language.
        ids: which rows.
        copy: tensors of their own. Else they are views where the rows follow each other.
    """
    adjacent = list(ids) == list(range(ids[0], ids[0] + len(ids))) if ids else False
    found: Observations = {}
    for name, rows in memory.items():
        if adjacent:
            view = rows[ids[0] : ids[0] + len(ids)]
            found[name] = torch.from_numpy(view.copy() if copy else view)
        else:
            found[name] = torch.from_numpy(rows[list(ids)])
    if instructions is not None:
        found["instruction"] = [instructions[index] for index in ids]
    return found
