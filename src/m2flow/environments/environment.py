"""`Environment`: one simulator with one episode at a time. What an adaptor, or a user, writes.

It knows nothing of batches, processes, torch, time limits or failures: `slots.py` drives several of
them, stops episodes at `spec.max_episode_steps`, and contains what they raise. Observing is apart
from stepping, so that a chunk of actions draws one picture and not one for each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from m2flow.environments.spec import EnvironmentSpec
from m2flow.errors import UserError

Array = np.ndarray[Any, Any]


class Transition(NamedTuple):
    """What one step did.

    Attributes:
        reward: of this step.
        terminated: the episode has come to its own end: no return follows.
        truncated: the episode was cut off: the return that would follow is estimated.
        success: the task stands solved after this step.
    """

    reward: float
    terminated: bool = False
    truncated: bool = False
    success: bool = False


class Environment(ABC):
    """One episode at a time; see the module docstring.

    `spec` (with `num_envs=1`) is set by `__init__`, which may leave the simulator itself to the
    first `reset`. `info` is what the simulator tells of the last step beside all that: no policy
    sees it, a reward function may. `looks_back` says that an observation depends on when the ones
    before were made: an episode that is replayed is then observed at the same steps.
    """

    spec: EnvironmentSpec
    info: Mapping[str, Any] = MappingProxyType({})
    looks_back: bool = False

    @abstractmethod
    def reset(self, seed: int, initial_state: int | None) -> None:
        """Begin an episode.

        Args:
            seed: in [0, 2**63). All chance of the episode follows from it.
            initial_state: number of the state to begin with: episodes of one number begin alike.
                None leaves the state to the seed.
        """

    @abstractmethod
    def step(self, action: Array) -> Transition:
        """Carry out one action, float32 [A] within the bounds of the spec."""

    @abstractmethod
    def observe(self) -> Mapping[str, Array]:
        """The observation after the last step, by the names of `spec.observations`."""

    def instruction(self) -> str:
        """The sentence of this episode; "" where there is no language."""
        return ""

    def render(self) -> Array:
        """A picture for people, uint8 [H, W, 3]."""
        raise UserError("cannot draw itself", key=self.spec.name)

    def state(self) -> Any:
        """The simulator's state, if `spec.restores` is "saved"; it can be pickled."""
        raise NotImplementedError(f"{self.spec.name} has no `state`: its actions are replayed")

    def restore(self, state: Any) -> None:
        """Go on where `state` was called, in an episode that `reset` has just begun."""
        raise NotImplementedError(f"{self.spec.name} has no `restore`: its actions are replayed")

    def close(self) -> None:  # noqa: B027, most simulators need none
        """Let go of the simulator."""


def seed_of(seed: int, initial_state: int | None) -> int:
    """The seed of an environment that has no list of initial states: their number takes its place.

    Returns:
        a whole number in [0, 2**31), which every simulator takes.
    """
    return (seed if initial_state is None else initial_state) % (1 << 31)


def as_picture(name: str, drawn: Any) -> Array:
    """What `render` has given as uint8 [H, W, 3]; whole numbers, shades and transparency will do.

    Raises:
        UserError: it is no picture.
    """
    picture = np.asarray(drawn)
    if picture.ndim == 2:
        picture = np.stack([picture] * 3, axis=-1)
    if (
        picture.dtype.kind not in "iu"
        or picture.ndim != 3
        or picture.shape[2] not in (3, 4)
        or not picture.size
    ):
        raise UserError(
            "draws no picture",
            key=name,
            value=f"{picture.dtype} {picture.shape}",
            expected="uint8 (height, width, 3) of `render`",
        )
    return picture[:, :, :3].astype(np.uint8, copy=False)
