"""What an environment shows and takes, before a run makes any: its spec, for prices.

An environment that runs in a lane's own process is made for it, and closed. Of a heavy simulator,
and of one whose package is not here, the spec follows from the family and the recipe's options;
what does not is assumed, and told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from m2flow.environments.libero import CAMERAS, MAX_STEPS
from m2flow.environments.metaworld import LONGEST
from m2flow.environments.registry import is_light, maker, not_installed
from m2flow.environments.slots import let_go
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec, image_spec
from m2flow.environments.trial import made
from m2flow.errors import UserError
from m2flow.workloads.embodied.config import EnvironmentSection


@dataclass(frozen=True)
class Shown:
    """What environments of a family show and take where nothing else is said.

    Attributes:
        state, actions: figures of each.
        pixels: height and width of each picture; 0 for none.
        cameras: names of the pictures.
        longest: steps of an episode at most.
        varies: whether state, actions and steps differ from task to task, so that they are guesses.
    """

    state: int
    actions: int
    pixels: int
    cameras: tuple[str, ...]
    longest: int
    varies: bool = False


SHOWN = {
    "libero": Shown(8, 7, 256, tuple(CAMERAS), 400),
    "maniskill": Shown(42, 7, 0, ("image",), 50, varies=True),
    "metaworld": Shown(39, 4, 0, ("image",), LONGEST),
    "envpool": Shown(39, 4, 0, ("image",), LONGEST, varies=True),
    "gymnasium": Shown(8, 2, 0, ("image",), 1000, varies=True),
    "table": Shown(2, 2, 32, ("image",), 24),
}

ON_PHOTOGRAPHS, PHOTOGRAPH = "Scene-v1", (480, 640)
"""How names of ManiSkill's tasks on photographs end, and height and width of what their camera
shows, whatever `pixels` says."""


def spec_before(section: EnvironmentSection) -> tuple[EnvironmentSpec, str]:
    """The spec of a recipe's environment, and what is assumed in it ("" for nothing).

    Raises:
        UserError: a light environment that is installed has no such task or option, or cannot be
            made.
    """
    name = section.name
    if is_light(name) and section.python is None and not_installed(name) is None:
        environment = made(name, maker(name, section.options))  # rewards do not change what is seen
        let_go(environment)
        return environment.spec, ""
    family, _, task = name.partition(":")
    known, options = SHOWN[family], section.options
    pixels = _count(options, "pixels", known.pixels)
    height, width = pixels, pixels
    if family == "maniskill" and task.endswith(ON_PHOTOGRAPHS):
        height, width = PHOTOGRAPH
    longest = known.longest
    if family == "libero":
        longest = MAX_STEPS.get("".join(task.partition("/")[0].split("_")[1:2]), longest)
    spec = EnvironmentSpec(
        name,
        1,
        (
            ObservationSpec("state", (known.state,)),
            *(image_spec(camera, height, width) for camera in _cameras(options, known) if pixels),
        ),
        ActionSpec(known.actions, (-inf,) * known.actions, (inf,) * known.actions),
        max_episode_steps=_count(options, "max_episode_steps", 0) or longest,
    )
    if not known.varies:
        return spec, ""
    return spec, (
        f"a state of {known.state} figures, actions of {known.actions}, episodes of at most "
        f"{spec.max_episode_steps} steps"
    )


def _count(options: Mapping[str, Any], name: str, otherwise: int) -> int:
    given = options.get(name, otherwise)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise UserError(
            "is no number of anything",
            key=f"environment.options.{name}",
            value=given,
            expected="a whole number of at least 0",
        )
    return given


def _cameras(options: Mapping[str, Any], known: Shown) -> tuple[str, ...]:
    given = options.get("cameras", known.cameras)
    if not isinstance(given, list | tuple) or any(one not in known.cameras for one in given):
        raise UserError(
            "names no cameras of the simulator",
            key="environment.options.cameras",
            value=given,
            expected=f"a list of names among {', '.join(known.cameras)}",
        )
    return tuple(given)
