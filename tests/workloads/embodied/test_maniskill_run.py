"""The recipes of ManiSkill on the real simulator: pictures with a tiny model, and states."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m2flow.environments.rendering import probe
from m2flow.errors import UserError
from m2flow.plan import parse_lanes
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.embodied.evaluation import examine
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers.source import WEIGHTS

if find_spec("mani_skill") is None:
    pytest.skip('needs the extra "maniskill"', allow_module_level=True)
if not probe("vulkan").works:
    pytest.skip("needs a Vulkan device", allow_module_level=True)

RECIPES = Path(__file__).parents[3] / "recipes"
STATES: dict[str, Any] = {
    "workload": "embodied",
    "name": "pick-cube",
    "mode": "eager",
    "steps": 2,
    "rollouts_per_step": 2,
    "environment": {
        "name": "maniskill:PickCube-v1",
        "processes": 1,
        "options": {"max_episode_steps": 10},
    },
    "rollout": {"horizon": 20},
    "evaluation": {"episodes": 2, "films": 1},
}


def last_row(run: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return found


def changed_weights(recipe: Any, run: Path) -> list[str]:
    """Weights of the last checkpoint that differ from those that the run began with."""
    source = EmbodiedExperiment(recipe).flow().actor.source
    before = source.make("cpu").state_dict()
    after = load_file(run / "checkpoints" / "latest" / WEIGHTS)
    return [name for name, weight in after.items() if not torch.equal(weight, before[name])]


def test_tasks_whose_assets_are_absent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mani_skill.utils import assets

    monkeypatch.setattr(assets, "is_data_source_downloaded", lambda name: False)
    recipe = read_recipe(RECIPES / "openvla-ppo-maniskill.yaml", ["model=/models/none"])
    with pytest.raises(UserError, match=r"assets are absent.*download_asset bridge_v2_real2sim"):
        EmbodiedExperiment(recipe)


def test_a_task_without_a_sentence_is_given_one() -> None:
    policy = {"kind": "openvla"}
    options = {"pixels": 32}
    with pytest.raises(UserError, match=r"no instructions.*environment\.options\.instruction"):
        EmbodiedExperiment(read_recipe(STATES, {"policy": policy, "environment.options": options}))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_states_are_learned_from_and_evaluated_by_seeds(tmp_path: Path) -> None:
    recipe = read_recipe(STATES, {})
    run = train(recipe, run_dir=tmp_path / "run")
    row = last_row(run)
    assert changed_weights(recipe, run)
    assert row["environment_steps"] == 40
    assert row["episodes/failed"] == 0
    assert row["reward/mean"] != 0
    assert row["train/grad_norm"] > 0
    asked = Examination(run / "checkpoints" / "latest", None, limit=2, lanes=parse_lanes("cpu:1"))
    first, again = examine(asked), examine(asked)
    assert first["about"] == "2 episodes of maniskill:PickCube-v1"
    assert first["return"] == again["return"], "by fixed seeds"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["openvla-ppo-maniskill", "openvla-grpo-maniskill"])
def test_recipes_run_by_state(name: str, tmp_path: Path) -> None:
    recipe: Any = read_recipe(RECIPES / f"{name}.yaml", ["model=states", "steps=2", "mode=eager"])
    assert [part.name for part in EmbodiedExperiment(recipe).spec.observations] == ["state"]
    run = train(recipe, run_dir=tmp_path / "run")
    row = last_row(run)
    assert row["environment_steps"] == 8 * 50
    assert row["episodes/failed"] == 0
    assert row["reward/mean"] > 0
    assert row["train/grad_norm"] > 0
    assert any(weight.startswith("actor.") for weight in changed_weights(recipe, run))
    assert (run / "films" / "step_000002_0.webp").stat().st_size > 500


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    find_spec("timm") is None or find_spec("peft") is None, reason="needs the extra vla"
)
@pytest.mark.parametrize("name", ["openvla-ppo-maniskill", "openvla-grpo-maniskill"])
def test_recipes_run_on_the_real_simulator(name: str, tmp_path: Path) -> None:
    changes = ["model=tiny", "steps=2", "mode=eager"]
    recipe: Any = read_recipe(RECIPES / f"{name}.yaml", changes)
    run = train(recipe, run_dir=tmp_path / "run")
    row = last_row(run)
    assert row["environment_steps"] == 64
    assert row["episodes/failed"] == 0
    assert row["reward/mean"] > 0
    assert row["train/grad_norm"] > 0
    moved = changed_weights(recipe, run)
    assert any("lora_" in weight for weight in moved)
    assert any("value_head" in weight for weight in moved) == (recipe.algorithm.name == "ppo")
    assert (run / "films" / "step_000002_0.webp").stat().st_size > 500
    assert "data:image/webp;base64," in (run / "report.html").read_text()
