"""Meta-World on the real simulator."""

from __future__ import annotations

import pytest
import torch

from m2flow.environments import make_environments
from m2flow.environments.rendering import backends
from m2flow.errors import UserError

pytest.importorskip("metaworld", reason='needs the extra "metaworld"')


def test_episodes_follow_from_their_seeds_in_processes():
    environments = make_environments("metaworld:reach-v3", 3, processes=1, max_episode_steps=20)
    try:
        first = environments.reset(None, [1, 1, 2])["state"]
        assert torch.equal(first[0], first[1])
        assert not torch.equal(first[0, 36:], first[2, 36:]), "another goal, and it is seen"
        assert bool(first[:, 36:].any())
        chunk = torch.rand(3, 15, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
        chunk[1] = chunk[0]
        outcome = environments.step(chunk)
        assert torch.equal(outcome.observation["state"][0], outcome.observation["state"][1])
        environments.reset([0], [1])
        again = environments.step(chunk[:1], [0])
        assert torch.equal(again.observation["state"][0], outcome.observation["state"][0])
        saved = environments.state()
        on = environments.step(chunk[:1, :5], [0])
        assert on.truncated.all()
        environments.restore(saved)
        replayed = environments.step(chunk[:1, :5], [0])
        assert torch.equal(on.observation["state"], replayed.observation["state"])
    finally:
        environments.close()


def test_pictures():
    if not any(found.works for found in backends() if found.name in ("egl", "osmesa")):
        pytest.skip("needs EGL or OSMesa")
    environments = make_environments("metaworld:push-v3", 2, processes=1, pixels=64)
    try:
        image = environments.reset(None, [1, 2])["image"]
        assert image.shape == (2, 64, 64, 3)
        assert image.float().std() > 5
        assert not torch.equal(image[0], image[1])
    finally:
        environments.close()


def test_unknown_tasks_name_the_nearest():
    with pytest.raises(UserError, match="did you mean 'reach-v3'"):
        make_environments("metaworld:reachv3", 1)
