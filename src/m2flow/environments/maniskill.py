"""ManiSkill 3 on the CPU: one environment of a task, by state or with pictures.

Needs a Vulkan device for state observations too. Physics on the CPU is deterministic, so episodes
are restored by replaying them. With pictures each step of a chunk is drawn, because ManiSkill
observes as part of its step. An episode terminates as the task says, mostly when it is solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from m2flow.environments.environment import Array, Environment, Transition, seed_of
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec, image_spec

RENDER_PIXELS = 256


class ManiSkillEnvironment(Environment):
    """One task.

    Args:
        task: such as "PushCube-v1".
        pixels: height and width of an "image" beside the state; 0 for none.
        control: ManiSkill's control mode.
        reward: ManiSkill's reward mode: "sparse", "dense" or "normalized_dense".
        max_episode_steps: 0 for the task's own.
    """

    def __init__(
        self,
        task: str,
        pixels: int = 0,
        control: str = "pd_ee_delta_pose",
        reward: str = "normalized_dense",
        max_episode_steps: int = 0,
    ) -> None:
        import gymnasium
        import mani_skill.envs  # noqa: F401, registers the tasks

        size = {"width": pixels or RENDER_PIXELS, "height": pixels or RENDER_PIXELS}
        limit = {"max_episode_steps": max_episode_steps} if max_episode_steps else {}
        made = gymnasium.make(
            task,
            num_envs=1,
            obs_mode="rgb" if pixels else "state",
            control_mode=control,
            reward_mode=reward,
            render_mode="rgb_array",
            sim_backend="physx_cpu",
            sensor_configs=size,
            **limit,
        )
        if pixels:
            from mani_skill.utils.wrappers.flatten import FlattenRGBDObservationWrapper

            made = FlattenRGBDObservationWrapper(made, rgb=True, depth=False, state=True)
        self._made, self._pixels = made, pixels
        self._keep(made.reset(seed=0)[0])
        space = made.unwrapped.single_action_space
        sentence = self._sentence()
        images = (image_spec("image", pixels, pixels),) if pixels else ()
        self.spec = EnvironmentSpec(
            f"maniskill:{task}",
            1,
            (ObservationSpec("state", self._seen["state"].shape), *images),
            ActionSpec(space.shape[0], tuple(map(float, space.low)), tuple(map(float, space.high))),
            max_episode_steps=made.spec.max_episode_steps,
            instructions=None if sentence is None else (),
        )

    @staticmethod
    def tasks() -> list[str]:
        """Names of the registered tasks."""
        import mani_skill.envs  # noqa: F401, registers them
        from mani_skill.utils.registration import REGISTERED_ENVS

        return sorted(REGISTERED_ENVS)

    def reset(self, seed: int, initial_state: int | None) -> None:
        self._keep(self._made.reset(seed=seed_of(seed, initial_state))[0])

    def step(self, action: Array) -> Transition:
        observed, reward, terminated, truncated, info = self._made.step(action)
        self._keep(observed)
        return Transition(
            float(reward), bool(terminated), bool(truncated), bool(info.get("success", False))
        )

    def observe(self) -> Mapping[str, Array]:
        return self._seen

    def instruction(self) -> str:
        return self._sentence() or ""

    def render(self) -> Array:
        return np.asarray(_alone(self._made.render()), np.uint8)

    def close(self) -> None:
        self._made.close()

    def _keep(self, observed: Any) -> None:
        if not self._pixels:
            self._seen = {"state": _alone(observed)}
            return
        # Several cameras stand behind each other in the last dimension: the first is the base's.
        self._seen = {"state": _alone(observed["state"]), "image": _alone(observed["rgb"])[..., :3]}

    def _sentence(self) -> str | None:
        """What the task is to be done in words, where it says so."""
        says = getattr(self._made.unwrapped, "get_language_instruction", None)
        if says is None:
            return None
        said = says()
        return str(said if isinstance(said, str) else said[0])


def _alone(batch: Any) -> Array:
    """The only row of ManiSkill's batches, which are tensors."""
    found: Array = np.asarray(batch[0].cpu() if hasattr(batch[0], "cpu") else batch[0])
    return found
