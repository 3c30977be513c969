"""Meta-World's fifty tasks (version 3): a Sawyer arm, goals observable, drawn anew each episode.

The simulator is made with the first episode. Its own registered environments freeze the first goal
for ever; here goal and objects follow from the episode's seed. An episode never terminates: success
is reported, and the limit truncates. Restored by replaying: warm starts of the solver are no part
of the state that Meta-World can save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m2flow.environments.environment import Array, Environment, Transition, seed_of
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec, image_spec
from m2flow.errors import UserError

CAMERA = "corner2"
RENDER_PIXELS = 256

LONGEST = 500
"""Steps after which Meta-World itself goes no further."""


class MetaWorldEnvironment(Environment):
    """One task.

    Args:
        task: such as "reach-v3".
        pixels: height and width of an "image" beside the state; 0 for none.
        max_episode_steps: after how many steps an episode is truncated; at most 500.
    """

    def __init__(self, task: str, pixels: int = 0, max_episode_steps: int = LONGEST) -> None:
        if not 1 <= max_episode_steps <= LONGEST:
            raise UserError(
                "Meta-World ends episodes by itself",
                key="environment.options.max_episode_steps",
                value=max_episode_steps,
                expected=f"1 to {LONGEST}",
            )
        self._task, self._pixels = task, pixels
        self._simulator: Any = None
        images = (image_spec("image", pixels, pixels),) if pixels else ()
        words = task.removesuffix("-v3").replace("-", " ")
        self.spec = EnvironmentSpec(
            f"metaworld:{task}",
            1,
            (ObservationSpec("state", (39,)), *images),
            ActionSpec(4, (-1.0,) * 4, (1.0,) * 4),
            max_episode_steps=max_episode_steps,
            instructions=(words,),
        )

    @staticmethod
    def tasks() -> list[str]:
        """Names of the fifty tasks."""
        import metaworld

        return sorted(metaworld.ALL_V3_ENVIRONMENTS)

    def reset(self, seed: int, initial_state: int | None) -> None:
        if self._simulator is None:
            self._simulator = self._made()
        self._simulator.seed(seed_of(seed, initial_state))
        self._state, _ = self._simulator.reset()

    def step(self, action: Array) -> Transition:
        assert self._simulator is not None, "reset first"
        self._state, reward, _, _, info = self._simulator.step(action)
        self.info = info
        return Transition(float(reward), success=bool(info["success"]))

    def observe(self) -> Mapping[str, Array]:
        found = {"state": self._state}
        if self._pixels:
            found["image"] = self.render()
        return found

    def instruction(self) -> str:
        (words,) = self.spec.instructions or ("",)
        return words

    def render(self) -> Array:
        assert self._simulator is not None, "reset first"
        return self._simulator.render()[::-1, ::-1]  # this camera hangs upside down

    def close(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
            self._simulator = None

    def _made(self) -> Any:
        import metaworld

        size = self._pixels or RENDER_PIXELS
        made = metaworld.ALL_V3_ENVIRONMENTS[self._task](
            render_mode="rgb_array", camera_name=CAMERA, width=size, height=size
        )
        made._partially_observable = False
        made._freeze_rand_vec = False
        made.seeded_rand_vec = True
        made._set_task_called = True
        vars(made).pop("sawyer_observation_space", None)  # cached with hidden goals
        return made
