"""ManiSkill on the real simulator."""

from __future__ import annotations

import pytest
import torch

from m2flow.environments import make_environments
from m2flow.environments.rendering import probe
from m2flow.errors import UserError

pytest.importorskip("mani_skill", reason='needs the extra "maniskill"')

CUBES = ("PickCube-v1", "PushCube-v1", "StackCube-v1")


def test_unknown_tasks_name_the_nearest():
    with pytest.raises(UserError, match="did you mean 'PushCube-v1'"):
        make_environments("maniskill:PushCub-v1", 1)


@pytest.mark.parametrize(("task", "pixels"), [*((task, 0) for task in CUBES), ("PushCube-v1", 64)])
def test_episodes_follow_from_their_seeds_in_processes(task, pixels):
    if not probe("vulkan").works:
        pytest.skip("needs a Vulkan device")
    environments = make_environments(f"maniskill:{task}", 2, processes=1, pixels=pixels)
    try:
        seen = environments.reset(None, [1, 1])
        assert torch.equal(seen["state"][0], seen["state"][1])
        size = environments.spec.action.size
        chunk = torch.rand(1, 4, size, generator=torch.Generator().manual_seed(0)) * 2 - 1
        outcome = environments.step(chunk.repeat(2, 1, 1))
        assert torch.equal(outcome.observation["state"][0], outcome.observation["state"][1])
        assert not torch.equal(outcome.observation["state"], seen["state"])
        assert outcome.reward.isfinite().all()
        assert not outcome.success.any()
        other = environments.reset(None, [1, 2])
        assert torch.equal(other["state"][0], seen["state"][0])
        assert not torch.equal(other["state"][0], other["state"][1])
        if pixels:
            assert outcome.observation["image"].shape == (2, 64, 64, 3)
            assert outcome.observation["image"].float().std() > 1
    finally:
        environments.close()
