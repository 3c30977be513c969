"""Any Gymnasium environment, by its id or its class.

A vector of figures becomes "state", a picture "image". Of a dictionary the pictures keep their
names, text becomes the instruction, and all else is joined in "state" by the order of the names.
Other observations are flattened as Gymnasium does. Episodes are restored by replaying them from
their seed: Gymnasium has no call that saves a state.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from m2flow.environments.environment import (
    Array,
    Environment,
    Transition,
    as_picture,
    seed_of,
)
from m2flow.environments.spec import (
    ActionSpec,
    EnvironmentSpec,
    ObservationSpec,
    image_spec,
)
from m2flow.errors import UserError

SUCCESS_KEYS = ("success", "is_success")


class GymnasiumEnvironment(Environment):
    """A Gymnasium environment; see the module docstring.

    Args:
        task: its id, such as "CartPole-v1"; "package:id" imports what registers it before.
        pixels: height and width of an "image" that is drawn of it, in place of its own
            observation; 0 for its own observation.
        motion: if not 0, the three channels of that "image" are three pictures in shades of grey,
            oldest first, so many observations apart, in place of colours.
        options: keyword arguments of the environment. It draws pictures where it can, unless
            they give another `render_mode`.
    """

    def __init__(self, task: str, /, pixels: int = 0, motion: int = 0, **options: Any) -> None:
        import gymnasium

        if "id" in options:
            raise UserError(
                "is what Gymnasium calls the environment's name",
                key="environment.options.id",
                hint="environment.name has it: gymnasium:ID",
            )
        package, _, own = task.rpartition(":")
        if package:
            importlib.import_module(package)
        creator = gymnasium.spec(own).entry_point
        if isinstance(creator, str):
            creator = gymnasium.envs.registration.load_env_creator(creator)
        taken = inspect.signature(creator).parameters
        if "render_mode" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            options = _drawing(creator, options)
        # `passive_checker` warns once a step of what the spec already says.
        made = gymnasium.make(task, **{"disable_env_checker": True, **options})
        self._wrap(f"gymnasium:{task}", made, pixels, motion)

    @classmethod
    def of_class(
        cls, name: str, made_by: Any, /, pixels: int = 0, motion: int = 0, **options: Any
    ) -> Environment:
        """An environment of a class that is not registered with Gymnasium."""
        self = cls.__new__(cls)
        if "render_mode" in inspect.signature(made_by).parameters:
            options = _drawing(made_by, options)
        self._wrap(name, made_by(**options), pixels, motion)
        return self

    @staticmethod
    def tasks() -> list[str]:
        """All registered ids."""
        import gymnasium

        return sorted(gymnasium.registry)

    def _wrap(self, name: str, made: Any, pixels: int, motion: int) -> None:
        if not isinstance(motion, int) or motion < 0 or (motion and not pixels):
            raise UserError(
                "is a number of observations between pictures",
                key="environment.options.motion",
                value=motion,
                expected="a whole number, and environment.options.pixels where it is not 0",
            )
        if not isinstance(pixels, int) or pixels < 0:
            raise UserError(
                "is no size of a picture",
                key="environment.options.pixels",
                value=pixels,
                expected="a whole number, 0 for none",
            )
        self._made, self._pixels = made, pixels
        self._motion, self._span, self.looks_back = motion, 2 * motion + 1, bool(motion)
        self._shades = deque[Array](maxlen=self._span)
        self._see = _observer(made.observation_space)
        self._space = made.action_space
        self._whole = np.dtype(made.action_space.dtype).kind in "iub"
        self._as_is = made.action_space.dtype == np.float32 and len(made.action_space.shape) == 1
        self._last: Any = None
        limit = getattr(made.spec, "max_episode_steps", None) if made.spec else None
        parts = (
            (image_spec("image", pixels, pixels),)
            if pixels
            else _parts(name, made.observation_space)
        )
        self.spec = EnvironmentSpec(
            name,
            1,
            parts,
            _action(name, made.action_space),
            max_episode_steps=limit,
            instructions=() if _texts(made.observation_space) else None,
        )

    def reset(self, seed: int, initial_state: int | None) -> None:
        self._last, self.info = self._made.reset(seed=seed_of(seed, initial_state))
        self._shades.clear()
        self._unseen = True

    def step(self, action: Array) -> Transition:
        space = self._space
        taken: Any = action
        if self.spec.action.num_discrete is not None:
            taken = int(space.start) + int(action[0])
        elif not self._as_is:
            taken = action.reshape(space.shape)
            if self._whole:
                taken = np.rint(taken)
            # In float64, which has the bounds of every space as they are; float32 may lie outside.
            taken = np.clip(taken.astype(np.float64), space.low, space.high).astype(space.dtype)
        self._last, reward, terminated, truncated, info = self._made.step(taken)
        self._unseen, self.info = True, info
        told = [info.get(key, False) for key in SUCCESS_KEYS] if info else []
        success = any(bool(one) and bool(one == one) for one in told)  # NaN: it does not know yet
        return Transition(float(reward), bool(terminated), bool(truncated), success)

    def observe(self) -> Mapping[str, Array]:
        if self._motion:
            if self._unseen:
                self._shades.extend([self._shade()] * (1 if self._shades else self._span))
                self._unseen = False
            shown = [self._shades[at] for at in (0, self._motion, -1)]
            return {"image": np.stack(shown, axis=-1)}
        if self._pixels:
            return {"image": shrink(self.render(), self._pixels, self._pixels)}
        return self._see(self._last)

    def instruction(self) -> str:
        texts = _texts(self._made.observation_space)
        return " ".join(str(self._last[key]) for key in texts) if texts else ""

    def render(self) -> Array:
        if self._made.render_mode != "rgb_array":
            raise UserError(
                "draws no pictures", key=self.spec.name, expected='render_mode "rgb_array"'
            )
        from gymnasium.error import DependencyNotInstalled

        try:
            return as_picture(self.spec.name, self._made.render())
        except DependencyNotInstalled as error:
            raise UserError("cannot draw itself", key=self.spec.name, hint=str(error)) from error

    def _shade(self) -> Array:
        """What there is to see now, in shades of grey, uint8 [pixels, pixels]."""
        from PIL import Image

        drawn = Image.fromarray(self.render()).convert("L")
        return np.asarray(drawn.resize((self._pixels,) * 2, Image.Resampling.BOX))

    def close(self) -> None:
        self._made.close()


def is_gymnasium(found: Any) -> bool:
    """Whether it is a class of Gymnasium environments; imports nothing to find out."""
    package = sys.modules.get("gymnasium")
    return package is not None and inspect.isclass(found) and issubclass(found, package.Env)


def _drawing(made_by: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options of what takes a `render_mode`, with the one that gives pictures if it has that."""
    metadata = getattr(made_by, "metadata", None)
    modes = metadata.get("render_modes") if isinstance(metadata, Mapping) else None
    if modes and "rgb_array" not in modes:
        return options
    return {"render_mode": "rgb_array", **options}


def shrink(picture_HWC: Array, height: int, width: int) -> Array:
    """The picture in another size, each pixel the mean of those that it covers.

    Where the picture is smaller than what is asked for, its pixels are repeated.
    """
    rows = np.arange(height) * picture_HWC.shape[0] // height
    columns = np.arange(width) * picture_HWC.shape[1] // width
    if picture_HWC.shape[0] < height or picture_HWC.shape[1] < width:
        return picture_HWC[rows][:, columns]
    sums = np.add.reduceat(picture_HWC.astype(np.float32), rows, axis=0)
    sums = np.add.reduceat(sums, columns, axis=1)
    heights = np.diff(np.append(rows, picture_HWC.shape[0]))[:, None, None]
    widths = np.diff(np.append(columns, picture_HWC.shape[1]))[None, :, None]
    return (sums / (heights * widths)).round().astype(np.uint8)


def _is_image(space: Any) -> bool:
    return space.dtype == np.uint8 and len(space.shape or ()) == 3 and space.shape[2] == 3


def _texts(space: Any) -> list[str]:
    """Names of the parts of a dictionary that are text."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        return []
    return sorted(key for key, part in space.items() if isinstance(part, spaces.Text))


def _images(space: Any) -> dict[str, str]:
    """Name of each picture in a dictionary, to its key there."""
    keys = sorted(key for key, part in space.items() if _is_image(part))
    return {"image": keys[0]} if len(keys) == 1 else {key: key for key in keys}


def _figures(space: Any) -> list[str]:
    """Keys of the parts of a dictionary that are neither picture nor text."""
    apart = {*_texts(space), *_images(space).values()}
    return sorted(key for key in space if key not in apart)


def _parts(name: str, space: Any) -> tuple[ObservationSpec, ...]:
    from gymnasium import spaces

    if _is_image(space):
        return (image_spec("image", *space.shape[:2]),)
    if not isinstance(space, spaces.Dict):
        return (_state_spec(name, space),)
    images = _images(space)
    found = [image_spec(own, *space[key].shape[:2]) for own, key in images.items()]
    keys = _figures(space)
    if keys:
        found.append(_state_spec(name, spaces.Dict({key: space[key] for key in keys})))
    if not found:
        raise _without_figures(name, space)
    return tuple(found)


def _state_spec(name: str, space: Any) -> ObservationSpec:
    from gymnasium import spaces

    try:
        if space.is_np_flattenable and not spaces.flatdim(space):
            raise _without_figures(name, space)
        flat = spaces.flatten_space(space)
    except NotImplementedError:
        flat = None
    if not isinstance(flat, spaces.Box):
        raise UserError(
            f"its observations ({type(space).__name__}) are no vector", key=name, value=space
        )
    return ObservationSpec(
        "state", flat.shape, "float32", float(flat.low.min()), float(flat.high.max())
    )


def _without_figures(name: str, space: Any) -> UserError:
    return UserError("its observations have no figures", key=name, value=space)


def _observer(space: Any) -> Callable[[Any], dict[str, Array]]:
    """What turns an observation of that space into the parts of the spec."""
    from gymnasium import spaces

    if _is_image(space):
        return lambda observed: {"image": observed}
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1:
            return lambda observed: {"state": observed}
        return lambda observed: {"state": _flat(space, observed)}
    if not isinstance(space, spaces.Dict):
        return lambda observed: {"state": _flat(space, observed)}
    images, keys = _images(space), _figures(space)

    def see(observed: Any) -> dict[str, Array]:
        found = {own: observed[key] for own, key in images.items()}
        if keys:
            found["state"] = np.concatenate([_flat(space[key], observed[key]) for key in keys])
        return found

    return see


def _flat(space: Any, observed: Any) -> Array:
    """An observation of that space as a vector, as Gymnasium flattens it."""
    from gymnasium import spaces

    _check(space, observed)
    is_box = isinstance(space, spaces.Box)  # whose figures Gymnasium would cut to its dtype
    return np.ravel(observed if is_box else spaces.flatten(space, observed))


def _check(space: Any, observed: Any) -> None:
    """Refuse what would be flattened as another observation is, without a word.

    Raises:
        ValueError: a choice that there is not, or figures in another order; a dimension of 1 may be
            left out.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            _check(part, observed[key])
    elif isinstance(space, spaces.Tuple):
        for part, seen in zip(space.spaces, observed, strict=True):
            _check(part, seen)
    elif isinstance(space, spaces.Box):
        shape = np.shape(observed)
        if [size for size in shape if size != 1] != [size for size in space.shape if size != 1]:
            raise ValueError(f"the shape {shape} is not of its space, {space}")
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        place = np.asarray(observed) - space.start
        if ((place < 0) | (place >= count)).any():
            raise ValueError(f"the observation {observed} is not of its space, {space}")


def _action(name: str, space: Any) -> ActionSpec:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return ActionSpec.discrete(int(space.n))
    if isinstance(space, spaces.Box):
        low, high = (tuple(map(float, bound.ravel())) for bound in (space.low, space.high))
        return ActionSpec(len(low), low, high)
    raise UserError(
        f"its actions ({type(space).__name__}) are neither a vector nor one choice",
        key=name,
        expected="Box or Discrete",
    )
