"""ManiSkill's tasks on photographs, whose assets are large: our part of them, on a stand-in."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from m2flow.environments.maniskill import ManiSkillEnvironment

TASK = "PutCarrotOnPlateInScene-v1"


class CarrotScene:
    """What `gymnasium.make` gives: one row of all, two cameras, solved in the second step."""

    def __init__(self) -> None:
        self.unwrapped, self.taken = self, 0
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)

    def get_language_instruction(self) -> list[str]:
        return ["put carrot on plate"]

    def seen(self) -> Any:
        rgb = torch.cat([torch.full((1, 48, 64, 3), value + self.taken) for value in (10, 99)], -1)
        return {"state": torch.zeros(1, 5), "rgb": rgb.byte()}

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self.taken = 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.taken += 1
        solved = torch.tensor([self.taken == 2])
        return self.seen(), torch.zeros(1), solved, torch.tensor([False]), {"success": solved}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put the stand-in where ManiSkill is imported from; what `gymnasium.make` was asked for."""
    task = SimpleNamespace(
        SUPPORTED_OBS_MODES=["rgb+segmentation"], SUPPORTED_REWARD_MODES=["none"]
    )
    entry = SimpleNamespace(asset_download_ids=[], max_episode_steps=80, cls=task)
    contents: dict[str, dict[str, Any]] = {
        "mani_skill": {}, "mani_skill.envs": {}, "mani_skill.utils": {"assets": None},
        "mani_skill.utils.registration": {"REGISTERED_ENVS": {TASK: entry}},
        "mani_skill.utils.wrappers": {},
        "mani_skill.utils.wrappers.flatten": {
            "FlattenRGBDObservationWrapper": lambda made, rgb, depth, state: made
        },
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    asked: dict[str, Any] = {}

    def make(name: str, **options: Any) -> CarrotScene:
        asked.update(options, task=name)
        return CarrotScene()

    monkeypatch.setattr(gymnasium, "make", make)
    return asked


def test_a_task_on_a_photograph_keeps_its_cameras_size_and_is_rewarded_by_success(
    asked: dict[str, Any],
) -> None:
    environment = ManiSkillEnvironment(TASK, pixels=256)
    assert (asked["obs_mode"], asked["reward_mode"]) == ("rgb+segmentation", "none")
    assert "sensor_configs" not in asked, "its camera is the photograph's"
    state, image = environment.spec.observations
    assert (state.shape, image.shape) == ((5,), (48, 64, 3))
    assert environment.spec.action.size == 7
    assert environment.spec.max_episode_steps == 80
    environment.reset(3, None)
    assert environment.instruction() == "put carrot on plate"
    first = environment.step(np.zeros(7, np.float32))
    assert (first.reward, first.terminated, first.success) == (0.0, False, False)
    assert np.all(environment.observe()["image"] == 11), "of the first camera alone"
    second = environment.step(np.zeros(7, np.float32))
    assert (second.reward, second.terminated, second.success) == (1.0, True, True)
