"""ManiSkill 3 on the CPU: one environment of a task, by state or with pictures.

Needs a Vulkan device for state observations too. Physics on the CPU is deterministic, so episodes
are restored by replaying them. With pictures each step of a chunk is drawn, because ManiSkill
observes as part of its step. An episode terminates as the task says, mostly when it is solved.

Tasks on photographs (PutCarrotOnPlateInScene-v1 and its like) are drawn in their camera's own size,
with the masks that put the scene before the photograph, and give no reward: success is theirs.
Their assets are not part of ManiSkill's package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from m2flow.environments.environment import Array, Environment, Transition, seed_of
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec, image_spec
from m2flow.errors import UserError

RENDER_PIXELS = 256

REWARD = "normalized_dense"
"""ManiSkill's reward mode where nothing is said."""


class ManiSkillEnvironment(Environment):
    """One task.

    Args:
        task: such as "PushCube-v1".
        pixels: height and width of an "image" beside the state; 0 for none.
        control: ManiSkill's control mode.
        reward: ManiSkill's reward mode: "sparse", "dense" or "normalized_dense"; of a task that
            gives none, success stands in for `REWARD`.
        max_episode_steps: 0 for the task's own.
        instruction: the sentence of a task that has none of its own; "" for none.
    """

    def __init__(
        self,
        task: str,
        pixels: int = 0,
        control: str = "pd_ee_delta_pose",
        reward: str = REWARD,
        max_episode_steps: int = 0,
        instruction: str = "",
    ) -> None:
        import gymnasium
        import mani_skill.envs  # noqa: F401, registers the tasks
        from mani_skill.utils.registration import REGISTERED_ENVS

        known = REGISTERED_ENVS[task]
        _check_assets(task, known.asset_download_ids)
        limit = max_episode_steps or known.max_episode_steps
        on_photograph = "rgb+segmentation" in known.cls.SUPPORTED_OBS_MODES
        side = pixels or RENDER_PIXELS
        supported = known.cls.SUPPORTED_REWARD_MODES
        if reward not in supported and reward != REWARD:  # of which some tasks have none
            raise UserError(
                "the task has no such reward",
                key="environment.options.reward",
                value=reward,
                expected=f"one of {', '.join(supported)}",
            )
        self._rewarded = reward in supported
        self._given = instruction
        made = gymnasium.make(
            task,
            num_envs=1,
            obs_mode=("rgb+segmentation" if on_photograph else "rgb") if pixels else "state",
            control_mode=control,
            reward_mode=reward if self._rewarded else "none",
            render_mode="rgb_array",
            sim_backend="physx_cpu",
            max_episode_steps=limit,
            **({} if on_photograph else {"sensor_configs": {"width": side, "height": side}}),
        )
        if pixels:
            from mani_skill.utils.wrappers.flatten import FlattenRGBDObservationWrapper

            made = FlattenRGBDObservationWrapper(made, rgb=True, depth=False, state=True)
        self._made, self._pixels = made, pixels
        self._keep(made.reset(seed=0)[0])
        space = made.unwrapped.single_action_space
        sentence = self._sentence()
        images = (image_spec("image", *self._seen["image"].shape[:2]),) if pixels else ()
        self.spec = EnvironmentSpec(
            f"maniskill:{task}",
            1,
            (ObservationSpec("state", self._seen["state"].shape), *images),
            ActionSpec(space.shape[0], tuple(map(float, space.low)), tuple(map(float, space.high))),
            max_episode_steps=limit,
            instructions=(instruction,) if instruction else None if sentence is None else (),
        )

    @staticmethod
    def tasks() -> list[str]:
        """Names of the registered tasks."""
        import mani_skill.envs  # noqa: F401, registers them
        from mani_skill.utils.registration import REGISTERED_ENVS

        return sorted(REGISTERED_ENVS)

    def reset(self, seed: int, initial_state: int | None) -> None:
        observed, self.info = self._made.reset(seed=seed_of(seed, initial_state))
        self._keep(observed)

    def step(self, action: Array) -> Transition:
        observed, reward, terminated, truncated, info = self._made.step(action)
        self.info = info
        self._keep(observed)
        success = bool(info.get("success", False))
        earned = float(reward) if self._rewarded else float(success)
        return Transition(earned, bool(terminated), bool(truncated), success)

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
        if self._given:
            return self._given
        says = getattr(self._made.unwrapped, "get_language_instruction", None)
        if says is None:
            return None
        said = says()
        return str(said if isinstance(said, str) else said[0])


def _check_assets(task: str, names: Any) -> None:
    """Refuse a task whose assets are absent; ManiSkill would ask on standard input."""
    from mani_skill.utils import assets

    for name in names or ():
        parts = assets.expand_data_group_into_individual_data_source_ids(name) if (
            name in assets.DATA_GROUPS
        ) else [name]  # fmt: skip
        if not all(assets.is_data_source_downloaded(part) for part in parts):
            raise UserError(
                "the assets are absent",
                key="environment",
                value=f"maniskill:{task}",
                hint=f"run: python -m mani_skill.utils.download_asset {name}",
            )


def _alone(batch: Any) -> Array:
    """The only row of ManiSkill's batches, which are tensors."""
    found: Array = np.asarray(batch[0].cpu() if hasattr(batch[0], "cpu") else batch[0])
    return found
