"""The recipes of LIBERO on the real simulator with a tiny model: rewards, update, film, figures."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m2flow.environments import rendering
from m2flow.errors import UserError
from m2flow.plan import parse_lanes
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.embodied.evaluation import examine
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers.source import WEIGHTS
from tests.cli.conftest import run_command
from tests.runtime.local_cluster import local_cluster

if find_spec("libero") is None:
    pytest.skip('needs the extra "libero"', allow_module_level=True)
if find_spec("timm") is None or find_spec("peft") is None:
    pytest.skip('needs the extra "vla"', allow_module_level=True)

RECIPES = Path(__file__).parents[3] / "recipes"
GRPO = RECIPES / "openvla-oft-grpo-libero-spatial.yaml"


def tiny(recipe: Path, *changes: str) -> Any:
    return read_recipe(recipe, ["model=tiny", "steps=2", "mode=eager", *changes])


def changed_weights(recipe: Any, run: Path) -> list[str]:
    """Weights of the last checkpoint that differ from those that the run began with."""
    source = EmbodiedExperiment(recipe).flow().actor.source
    before = source.make(torch.device("cpu")).state_dict()
    after = load_file(run / "checkpoints" / "latest" / WEIGHTS)
    return [name for name, weight in after.items() if not torch.equal(weight, before[name])]


def test_starts_come_to_all_states_of_all_tasks() -> None:
    experiment = EmbodiedExperiment(tiny(GRPO, "rollouts_per_step=100", "evaluation.episodes=20"))
    states = torch.cat([experiment.batch(step)["initial_state"] for step in range(10)])
    assert sorted(states.tolist()) == list(range(500))
    held_out = experiment.held_out()
    assert held_out is not None
    asked = [experiment.spec.task_of(state) for state in held_out["initial_state"].tolist()]
    assert asked == [f"libero_spatial/{task}" for task in range(10) for _ in range(2)]
    again = EmbodiedExperiment(tiny(GRPO, "rollouts_per_step=100"))
    assert torch.equal(again.batch(3)["initial_state"], experiment.batch(3)["initial_state"])


def test_a_group_begins_in_one_state_of_one_task() -> None:
    from m2flow.workloads.embodied.workers.stages import begin_alike

    experiment = EmbodiedExperiment(tiny(GRPO))
    rollouts = begin_alike(experiment.batch(0), group_size=2)
    states = rollouts["initial_state"].view(-1, 2)
    assert torch.equal(states[:, 0], states[:, 1])
    assert int(states.max()) < 500


def test_nothing_to_draw_with_is_said_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> rendering.Backend:
        return rendering.Backend(name, False, "is not installed")

    monkeypatch.setattr(rendering, "probe", missing)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    with pytest.raises(UserError, match=r"nothing can draw pictures here.*install OSMesa"):
        EmbodiedExperiment(tiny(GRPO))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "openvla-oft-grpo-libero-spatial",
        pytest.param("openvla-oft-ppo-libero-spatial", marks=pytest.mark.slow),
        pytest.param("pi0-ppo-libero-spatial", marks=pytest.mark.slow),
    ],
)
def test_recipes_run_on_the_real_simulator(name: str, tmp_path: Path) -> None:
    if not any(found.works for found in rendering.backends() if found.name != "vulkan"):
        pytest.skip("needs EGL or OSMesa")
    recipe = tiny(RECIPES / f"{name}.yaml")
    run = train(recipe, run_dir=tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    assert last["episodes/failed"] == 0
    assert last["environment_steps"] == recipe.rollouts_per_step * recipe.rollout.horizon
    moved = changed_weights(recipe, run)
    assert last["train/grad_norm"] > 0
    assert any("lora_" in name or "model." in name for name in moved)
    if recipe.algorithm.name == "ppo":
        assert last["reward/mean"] in (0.0, 1.0)
        assert any("value_head" in name for name in moved), "it learns that nothing was earned"
    else:
        assert recipe.policy.chunk == 8
        assert last["reward/mean"] < 0, "distances from the hand to the object"
    assert (run / "films" / "step_000002_0.webp").stat().st_size > 500
    assert "data:image/webp;base64," in (run / "report.html").read_text()
    asked = Examination(run / "checkpoints" / "latest", None, limit=2, lanes=parse_lanes("cpu:1"))
    figures = examine(asked)
    assert figures["about"] == "2 episodes of libero:libero_spatial"
    tasks = [key for key in figures if key.startswith("success/")]
    assert tasks == ["success/libero_spatial/0", "success/libero_spatial/5"]
    assert figures["success_low"] <= figures["success"] <= figures["success_high"]


@pytest.mark.timeout(900)
def test_the_command_trains_on_lanes_as_it_is(tmp_path: Path) -> None:
    """Mode `auto`, simulators in processes of the lanes; episodes shorter than the recipe's."""
    if not any(found.works for found in rendering.backends() if found.name != "vulkan"):
        pytest.skip("needs EGL or OSMesa")
    short = ("environment.options.max_episode_steps=16", "rollout.horizon=16")
    with local_cluster(2):
        words = ("model=tiny", "steps=2", "lanes=cpu:2", *short, "--run-dir", tmp_path / "run")
        done = run_command("train", GRPO, *words)
    assert done.code == 0, done.err
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    assert (last["episodes/failed"], last["environment_steps"]) == (0, 4 * 16)
    assert last["train/grad_norm"] > 0
    assert (tmp_path / "run" / "films" / "step_000002_0.webp").stat().st_size > 500
