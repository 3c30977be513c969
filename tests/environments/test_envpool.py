"""EnvPool on the real simulators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from m2flow.environments import make_environments
from m2flow.errors import UserError
from m2flow.workloads.common import train

pytest.importorskip("envpool", reason='needs the extra "envpool"')

REACH = "envpool:MetaWorld/Reach-v3"


def test_episodes_follow_from_their_seeds_and_come_back() -> None:
    environments = make_environments(REACH, 3, max_episode_steps=20)
    try:
        assert environments.spec.action.size == 4
        assert environments.spec.max_episode_steps == 20
        first = environments.reset(None, [1, 1, 2])["state"]
        assert torch.equal(first[0], first[1])
        assert not torch.equal(first[0, 36:], first[2, 36:]), "another goal, and it is seen"
        chunk = torch.rand(3, 15, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
        outcome = environments.step(chunk)
        assert outcome.steps.tolist() == [15, 15, 15]
        environments.reset([0], [1])
        again = environments.step(chunk[:1], [0])
        assert torch.equal(again.observation["state"][0], outcome.observation["state"][0])
        saved = environments.state()
        on = environments.step(chunk[:1], [0])
        assert on.truncated.all()
        assert on.steps.tolist() == [5]
        environments.restore(saved)
        replayed = environments.step(chunk[:1], [0])
        assert torch.equal(on.observation["state"], replayed.observation["state"])
    finally:
        environments.close()


def test_discrete_actions_and_an_end_of_their_own() -> None:
    environments = make_environments("envpool:CartPole-v1", 2, processes=1)
    try:
        assert environments.spec.action.num_discrete == 2
        environments.reset(None, [1, 2])
        outcome = environments.step(torch.zeros(2, 30, 1, dtype=torch.int64))
        assert outcome.terminated.all()
        assert (outcome.steps < 30).all()
        assert torch.equal(outcome.reward.sum(1).long(), outcome.steps)
    finally:
        environments.close()


def test_unknown_tasks_and_options_name_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'MetaWorld/Reach-v3'"):
        make_environments("envpool:MetaWorld/Reech-v3", 1)
    with pytest.raises(UserError, match=r"no such option.*did you mean 'max_episode_steps'"):
        make_environments(REACH, 1, max_episode_step=20)
    with pytest.raises(UserError, match=r"environment\.num_threads.*no such option"):
        make_environments(REACH, 1, num_threads=3)


@pytest.mark.timeout(600)
def test_ppo_trains_in_them(tmp_path: Path) -> None:
    recipe = {
        "workload": "embodied", "name": "reach", "mode": "eager", "steps": 2,
        "environment": {"name": REACH, "options": {"max_episode_steps": 50}},
        "rollouts_per_step": 4,
        "rollout": {"horizon": 100}, "evaluation": {"episodes": 2, "films": 1},
    }  # fmt: skip
    run = train(recipe, run_dir=tmp_path / "run")
    assert '"environment_steps": 400' in (run / "metrics.jsonl").read_text()
