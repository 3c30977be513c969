"""What an environment takes and gives: shapes, bounds and limits, known before it runs.

NumPy alone, because the processes of simulators read it and need no torch. Legend: B environments,
K actions of a chunk, A figures of an action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, Literal

import numpy as np

from m2flow.errors import UserError

TOLERANCE = 1e-4
"""How far an action may lie outside its bounds: rounding of policies that compute in bfloat16
is theirs to clip, rounding of float32 is not a mistake."""

STEPS = 4
"""How many steps of float32 an action may lie outside its bounds, where those are more."""

FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True)
class ObservationSpec:
    """One named part of an observation, as each environment gives it.

    Attributes:
        name: "state", "image", "wrist_image" or a name of the environment's own.
        shape: without the dimension of environments; an image is (height, width, 3), a state
            (figures,).
        dtype: "float32" or "uint8"; an image is uint8, a state float32.
        low, high: bounds of all its figures; infinite where there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"] = "float32"
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "uint8"):
            raise UserError(
                f"observation {self.name!r} has a dtype that nothing takes",
                key="dtype",
                value=self.dtype,
                expected="float32 or uint8",
            )
        if not isinstance(self.shape, tuple) or not all(_counts(size) for size in self.shape):
            raise UserError(
                f"observation {self.name!r} has no such shape",
                key="shape",
                value=self.shape,
                expected="a tuple of whole numbers above 0",
            )

    @property
    def is_picture(self) -> bool:
        """Whether policies can look at it."""
        return self.dtype == "uint8" and len(self.shape) == 3 and self.shape[2] == 3

    @property
    def nbytes(self) -> int:
        """Bytes of one environment's part."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def image_spec(name: str, height: int, width: int) -> ObservationSpec:
    """An RGB picture, uint8 [height, width, 3]."""
    return ObservationSpec(name, (height, width, 3), "uint8", 0, 255)


def _counts(number: object) -> bool:
    """Whether it says how many there are of something that there is."""
    return isinstance(number, Integral) and int(number) > 0


@lru_cache
def _exact(
    low: tuple[float, ...], high: tuple[float, ...]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bounds as arrays, float32."""
    return np.array(low, np.float32), np.array(high, np.float32)


@lru_cache
def _widened(
    low: tuple[float, ...], high: tuple[float, ...]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bounds as float32 has them with their tolerance, finite ones, float64; read at every step."""
    most, step = (float(figure) for figure in (FLOAT32.max, FLOAT32.eps))
    low_A, high_A = (np.clip(x.astype(np.float64), -most, most) for x in _exact(low, high))
    return (
        low_A - np.maximum(TOLERANCE, STEPS * step * np.abs(low_A)),
        high_A + np.maximum(TOLERANCE, STEPS * step * np.abs(high_A)),
    )


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """An action: `size` figures within bounds, or one number of `num_discrete` choices.

    Attributes:
        size: A, figures of one action; 1 where it is a choice.
        low, high: bounds of each figure, in any sequence; infinite where there are none.
        num_discrete: number of choices, 0 .. num_discrete - 1; None for continuous actions.
    """

    size: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_discrete: int | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):  # a list or an array cannot be hashed, as each step does
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        sizes = self.size, len(self.low), len(self.high)
        if not _counts(self.size) or len(set(sizes)) > 1:
            raise UserError(
                "an action has figures, and each has bounds", key="actions", value=sizes
            )
        if not all(low <= high for low, high in zip(self.low, self.high, strict=True)):
            raise UserError(
                "bounds are the wrong way round, or no numbers",
                key="actions",
                value=(self.low, self.high),
            )
        if self.num_discrete is not None and not _counts(self.num_discrete):
            raise UserError("there is no choice", key="actions", value=self.num_discrete)

    @classmethod
    def discrete(cls, choices: int) -> ActionSpec:
        """One of `choices` actions."""
        return cls(1, (0.0,), (choices - 1.0,), choices)

    def within(self, actions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Actions, float32 [..., A], of which none is out of bounds by rounding; a copy."""
        low_A, high_A = _exact(self.low, self.high)
        return np.minimum(np.maximum(actions, low_A), high_A)

    def check(self, action_BKA: np.ndarray[Any, Any], *, whole: bool = False) -> None:
        """Refuse actions that this environment cannot take.

        Args:
            action_BKA: the actions.
            whole: they are known to be whole numbers.

        Raises:
            UserError: another shape, figures outside the bounds or not finite, or no choice.
        """
        shape = action_BKA.shape
        low_A, high_A = _widened(self.low, self.high)
        if len(shape) != 3 or shape[2] != self.size or shape[1] < 1:
            raise UserError(
                "the policy's actions do not fit the environment",
                key="actions",
                value=tuple(shape),
                expected=f"[environments, chunk, {self.size}]",
            )
        inside = (action_BKA >= low_A) & (action_BKA <= high_A)  # not so what is no number
        if not inside.all():
            if not np.isfinite(action_BKA).all():
                raise UserError(
                    "an action is not finite",
                    key="actions",
                    hint="the policy has diverged: lower its learning rate",
                )
            outside = ~inside
            figure = int(np.argwhere(outside)[0][2])
            raise UserError(
                f"figure {figure} of an action is out of bounds",
                key="actions",
                value=float(action_BKA[outside][0]),
                expected=f"{self.low[figure]} to {self.high[figure]}",
                hint="squash or clip actions in the policy, or un-normalise them",
            )
        if (
            self.num_discrete is not None
            and not whole
            and (action_BKA != np.rint(action_BKA)).any()
        ):
            raise UserError(
                "a choice is not a whole number",
                key="actions",
                expected=f"0 to {self.num_discrete - 1}",
            )

    def require(
        self,
        size: int,
        low: Sequence[float] | None = None,
        high: Sequence[float] | None = None,
        num_discrete: int | None = None,
    ) -> None:
        """Refuse a policy that gives other actions, before anything is started.

        Args:
            size: figures of one action of the policy.
            low, high: the bounds within which the policy acts; None where it takes the
                environment's own.
            num_discrete: the policy's choices; None for continuous actions.

        Raises:
            UserError: size, bounds or number of choices do not fit.
        """
        if (self.num_discrete is None) != (num_discrete is None):
            kinds = ("continuous", "discrete")
            raise UserError(
                f"the policy's actions are {kinds[num_discrete is not None]}",
                key="policy",
                expected=f"{kinds[self.num_discrete is not None]} actions",
            )
        if num_discrete != self.num_discrete:
            raise UserError(
                "the policy has another number of choices than the environment",
                key="policy",
                value=num_discrete,
                expected=str(self.num_discrete),
            )
        if size != self.size:
            raise UserError(
                "the policy's actions have another size than the environment's",
                key="policy",
                value=size,
                expected=str(self.size),
            )
        wide_low, wide_high = (ends.tolist() for ends in _widened(self.low, self.high))
        for name, bounds, own, wide, sign in (
            ("low", low, self.low, wide_low, 1),
            ("high", high, self.high, wide_high, -1),
        ):
            if bounds is None:
                continue
            if len(bounds) != self.size or any(
                sign * his < min(sign * mine, sign * far)
                for his, mine, far in zip(bounds, own, wide, strict=True)
            ):
                raise UserError(
                    f"the policy's {name} bounds of actions do not fit the environment",
                    key="policy",
                    value=tuple(bounds),
                    expected=f"within {own}",
                )


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """An environment, or several equal ones.

    Attributes:
        name: as the registry knows it, such as "gymnasium:CartPole-v1".
        num_envs: how many environments there are.
        observations: the tensors of an observation.
        action: what `step` takes.
        max_episode_steps: an episode is truncated after so many steps; None for no bound.
        instructions: all sentences that an episode may carry, or () where they are not known
            beforehand; None where there is no language.
        num_initial_states: how many numbered initial states there are; None where any number
            names one.
        tasks: name of each task and how many of the initial states are its own, in the order of
            their numbers; () where there is one task.
        restores: how an episode comes back from `state`: "saved" from the simulator's own state,
            "replayed" by its seed and its actions.
    """

    name: str
    num_envs: int
    observations: tuple[ObservationSpec, ...]
    action: ActionSpec
    max_episode_steps: int | None = None
    instructions: tuple[str, ...] | None = None
    num_initial_states: int | None = None
    tasks: tuple[tuple[str, int], ...] = ()
    restores: Literal["saved", "replayed"] = "replayed"

    def __post_init__(self) -> None:
        if self.max_episode_steps is not None and not _counts(self.max_episode_steps):
            raise UserError(
                f"an episode of {self.name} has no such number of steps",
                key="max_episode_steps",
                value=self.max_episode_steps,
                expected="a whole number, at least 1, or None for no bound",
            )
        if isinstance(self.instructions, str):  # which is a collection too: of letters
            raise UserError(
                f"{self.name} gives its sentences as one",
                key="instructions",
                value=self.instructions,
                expected="a tuple of sentences, of one too: (sentence,)",
            )
        if self.num_initial_states is not None and not _counts(self.num_initial_states):
            raise UserError(
                f"{self.name} has no such number of initial states",
                key="num_initial_states",
                value=self.num_initial_states,
                expected="a whole number, at least 1, or None where any number names one",
            )
        of_tasks = sum(count for _, count in self.tasks)
        if self.tasks and of_tasks != self.num_initial_states:
            raise UserError(
                f"the tasks of {self.name} do not share its initial states",
                key="tasks",
                value=of_tasks,
                expected=f"num_initial_states = {self.num_initial_states} in all",
            )
        if self.restores not in ("saved", "replayed"):
            raise UserError(
                f"{self.name} cannot be restored so",
                key="restores",
                value=self.restores,
                expected="saved or replayed",
            )
        names = [part.name for part in self.observations]
        for name in names:
            if name == "instruction" or names.count(name) > 1:
                raise UserError(
                    f"{self.name} gives an observation whose name is taken",
                    key="observations",
                    value=name,
                    expected="a name of its own for each, and sentences by `instructions`",
                )

    def task_of(self, initial_state: int) -> str:
        """Name of the task that a numbered initial state is one of; the environment's, if alone."""
        for task, count in self.tasks:
            if initial_state < count:
                return task
            initial_state -= count
        return self.name

    def observation(self, name: str) -> ObservationSpec:
        """The part of that name.

        Raises:
            UserError: the environment gives no such part.
        """
        for spec in self.observations:
            if spec.name == name:
                return spec
        names = ", ".join(spec.name for spec in self.observations)
        raise UserError(
            f"{self.name} gives no such observation", key=name, expected=f"one of {names}"
        )

    def state_size(self) -> int:
        """How many figures the state has, as a policy reads it.

        Raises:
            UserError: there is no state, or it is no vector of figures.
        """
        part = self.observation("state")
        if len(part.shape) != 1 or part.dtype != "float32":
            raise UserError(
                f"{self.name} gives a state that is no vector",
                key="state",
                value=f"{part.dtype} {part.shape}",
                expected="float32 (figures,)",
            )
        return part.shape[0]

    def picture_size(self, cameras: Sequence[str]) -> tuple[int, int]:
        """Height and width of the pictures of cameras.

        Raises:
            UserError: there is no such picture, or two of different sizes.
        """
        pictures = {part.name: part.shape for part in self.observations if part.is_picture}
        for part in self.observations:
            if part.name in cameras and part.name not in pictures:
                raise UserError(
                    f"{self.name} gives no picture by this name",
                    key="policy.cameras",
                    value=f"{part.name}: {part.dtype} {part.shape}",
                    expected="uint8 (height, width, 3)",
                )
        for camera in cameras or ("",):
            if camera not in pictures:
                raise UserError(
                    f"{self.name} has no such picture",
                    key="policy.cameras",
                    value=camera,
                    expected=" or ".join(map(repr, pictures)) or "a picture; it has none",
                )
        sizes = {camera: pictures[camera][:2] for camera in cameras}
        if len(set(sizes.values())) > 1:
            raise UserError("its pictures differ in size", key="policy.cameras", value=sizes)
        height, width = sizes[cameras[0]]
        return height, width
