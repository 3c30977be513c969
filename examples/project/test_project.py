"""The reward is right, the flow learns, the recipe trains: `pytest`, in less than a minute."""

import json
from pathlib import Path

import my_flow
import my_reward
import pytest

from m2flow.workloads.common import train


@pytest.mark.parametrize(
    ("completion", "finished", "reward"),
    [("#11", True, 1.0), ("#12", True, 0.2), ("11", True, 0.0), ("#11", False, 0.0)],
)
def test_reward(completion: str, finished: bool, reward: float) -> None:
    row = {"answer": "11", "finished": finished}
    assert my_reward.score("4+7=", completion, [], row) == reward


def test_the_flow_learns() -> None:
    rewards = my_flow.train(steps=40)
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.1


def test_the_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)  # the reward is looked for here
    run = train("recipe.yaml", {"steps": 2, "mode": "eager"}, run_dir=tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
