"""Recipes of published models: what a tiny one stands in for, and what is refused before a run."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m2flow.errors import UserError
from m2flow.plan import parse_lanes
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.embodied.evaluation import examine
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.flow import recipe_flow
from m2flow.workloads.embodied.workload import WORKLOAD

RECIPES = Path(__file__).parents[3] / "recipes"
PUBLISHED = sorted(
    path.stem for pattern in ("openvla-*", "pi0-*") for path in RECIPES.glob(f"{pattern}.yaml")
)
TABLE: dict[str, Any] = {
    "workload": "embodied",
    "name": "published",
    "mode": "eager",
    "steps": 1,
    "rollouts_per_step": 4,
    "environment": {"name": "table:reach"},
    "policy": {"kind": "openvla-oft", "chunk": 2},
    "rollout": {"horizon": 4},
    "update": {"epochs": 1, "minibatches": 2},
    "evaluation": {"episodes": 2, "films": 0},
}
needs_vla = pytest.mark.skipif(
    find_spec("timm") is None or find_spec("peft") is None, reason="needs the extra vla"
)

SHORT = {"horizon": 2, "automatic_reset": False}
"""Rollouts that are one episode, which ends after two steps."""


def refused(changes: dict[str, Any]) -> str:
    """The one line that a recipe is refused with, before anything is started."""
    with pytest.raises(UserError) as caught:
        EmbodiedExperiment(read_recipe(TABLE, changes))
    line = str(caught.value)
    assert "\n" not in line
    return line


def checkpoint(folder: Path, actions: int = 2, end: float = 1.0, regresses: bool = False) -> str:
    """A small OpenVLA in the published layout, with one data set's statistics."""
    from m2flow.models.policies.vla.checkpoint import save_policy
    from m2flow.models.policies.vla.heads import L1Head
    from m2flow.models.policies.vla.tiny import tiny_openvla

    action = {"q01": [-end] * actions, "q99": [end] * actions, "mask": [True] * actions}
    policy: Any = tiny_openvla(["reach the red ball"], {"action": action}, parallel=regresses)
    if regresses:
        policy.l1_head = L1Head(policy.model.embedding_size, actions)
    save_policy(policy, folder)
    return str(folder)


# --- the tiny stand-in --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_have_full_sizes_and_tiny_ones(name: str) -> None:
    assert len(PUBLISHED) == 5
    unnamed: Any = read_recipe(RECIPES / f"{name}.yaml")
    with pytest.raises(UserError, match="model=FOLDER, or model=tiny"):
        EmbodiedExperiment(unnamed)
    with pytest.raises(UserError, match="model=FOLDER, or model=tiny"):
        WORKLOAD.check_here(unnamed)
    full = read_recipe(RECIPES / f"{name}.yaml", ["model=/models/some"])
    tiny = read_recipe(RECIPES / f"{name}.yaml", ["model=tiny", "steps=2", "rollout.horizon=80"])
    assert full.name == tiny.name == name
    assert full.tiny
    assert not tiny.tiny
    assert full.rollouts_per_step >= 64 > 4 >= tiny.rollouts_per_step
    assert (tiny.steps, tiny.rollout.horizon) == (2, 80), "what the command line says wins"
    assert tiny.policy == full.policy
    again = read_recipe(tiny)
    assert again == tiny, "as it is read from the run's own config.yaml"


@pytest.mark.parametrize(
    ("model", "told"), [("some/model", "{}/some/model"), ("tiny", "tiny"), ("~/model", "{}/model")]
)
def test_lanes_are_told_where_the_model_lies(
    model: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another machine work where Ray was started there, and not in this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe: Any = read_recipe(TABLE, {"model": model})
    flow: Any = recipe_flow(recipe)
    assert flow.actor.source.model == flow.learner.source.model == told.format(tmp_path)
    assert recipe.model == model


def test_small_policies_refuse_a_model() -> None:
    with pytest.raises(UserError, match="model: a policy of kind mlp is made from its sizes"):
        read_recipe(TABLE, {"policy": {"kind": "mlp"}, "model": "tiny"})


@needs_vla
@pytest.mark.parametrize("kind", ["openvla-oft", "pi0"])
def test_a_tiny_model_is_trained_and_changes(kind: str, tmp_path: Path) -> None:
    policy = {"kind": kind, "chunk": 2, "lora_rank": 0}
    run = train(TABLE, {"model": "tiny", "policy": policy}, run_dir=tmp_path / "run")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["environment_steps"] == 16
    assert row["train/grad_norm"] > 0


@needs_vla
def test_a_run_of_pi0_whose_unused_table_had_moments_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs begun before the table was left out of training ended in an assertion when resumed."""
    changes = {"model": "tiny", "policy": {"kind": "pi0", "chunk": 2}, "evaluation.episodes": 0}
    with monkeypatch.context() as earlier:
        earlier.setattr(torch.nn.Embedding, "requires_grad_", lambda self, _: self)
        train(TABLE, changes, run_dir=tmp_path / "run")
    with pytest.raises(UserError, match=r"dit\.embed_tokens\.weight.*start a new run") as caught:
        train(TABLE, {**changes, "steps": 2}, run_dir=tmp_path / "run", resume=True)
    assert "\n" not in str(caught.value)


@needs_vla
def test_a_fine_tuned_model_is_a_published_folder_again(tmp_path: Path) -> None:
    """Adapters added: it acts as the run's own policy does, without m2flow's recipe."""
    from m2flow.models.policies.vla.checkpoint import load_openvla_oft
    from m2flow.models.policies.vla.policy import VLAOptions
    from m2flow.workloads.embodied.workers.source import PolicySource

    folder = checkpoint(tmp_path / "model")
    policy = {"kind": "openvla-oft", "chunk": 2, "lora_rank": 2}
    changes = {"model": folder, "policy": policy, "optimizer": {"learning_rate": 0.01}}
    run = train(TABLE, changes, run_dir=tmp_path / "run")
    saved = run / "checkpoints" / "latest"
    recipe: Any = read_recipe(TABLE, changes)
    spec = EmbodiedExperiment(recipe).spec
    own: Any = PolicySource(recipe.policy, spec, folder=str(saved), model=folder).make()
    options = VLAOptions(chunk=2, critic=True)
    again = load_openvla_oft(saved / "model", options, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    seen = {
        "image": torch.randint(0, 256, (2, 32, 32, 3), generator=generator).byte(),
        "instruction": ["reach the red ball"] * 2,
    }
    one, two = (some.act(seen, seeds=[1, 2]) for some in (own, again))
    assert torch.equal(one.tokens, two.tokens)
    torch.testing.assert_close(one.logprobs, two.logprobs, rtol=1e-4, atol=1e-4)
    first = load_openvla_oft(folder, options, dtype=torch.float32)
    assert not torch.allclose(first.act(seen, seeds=[1, 2]).logprobs, two.logprobs, atol=1e-4)


@needs_vla
def test_activations_are_computed_again_where_it_is_asked_for(tmp_path: Path) -> None:
    """The same step of training, and what has no such blocks is refused."""
    rows = []
    for name, again in (("kept", False), ("again", True)):
        changes = {
            "model": "tiny", "policy": {"kind": "openvla-oft", "chunk": 2, "lora_rank": 2},
            "update": {"epochs": 1, "minibatches": 2, "gradient_checkpointing": again},
        }  # fmt: skip
        run = train(TABLE, changes, run_dir=tmp_path / name)
        rows.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]))
    for figure in ("loss/policy", "train/grad_norm", "eval/return"):
        assert rows[0][figure] == pytest.approx(rows[1][figure], rel=1e-3, abs=1e-6), figure
    with pytest.raises(UserError, match="no blocks that can be computed again"):
        read_recipe(TABLE, {"policy": {"kind": "pi0"}, "update": {"gradient_checkpointing": True}})


@needs_vla
def test_a_checkpoint_is_what_acts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    experiment = EmbodiedExperiment(read_recipe(TABLE, {"model": folder}))
    from m2flow.models.policies.vla.checkpoint import load_openvla_oft

    ours = dict(experiment.flow().learner.source.make().named_parameters())
    theirs = dict(load_openvla_oft(folder, dtype=torch.float32).named_parameters())
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


@needs_vla
def test_a_published_model_is_evaluated_by_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    lanes = parse_lanes("cpu:1")
    asked = Examination(Path("tiny"), recipe, limit=3, lanes=lanes)
    recipe.write_text(json.dumps(TABLE | {"tiny": {"rollout": SHORT}}))
    figures = examine(asked)
    assert figures["about"] == "3 episodes of table:reach"
    assert figures["length"] <= 2
    recipe.write_text(json.dumps(TABLE | {"tiny": {"rollout.horizon": 2}}))
    assert examine(asked)["length"] > 2, "whole episodes, where training's rollouts are none"
    with pytest.raises(UserError, match="or a model's folder and --data RECIPE"):
        examine(Examination(tmp_path, None))


@needs_vla
def test_a_regression_head_is_evaluated_and_not_trained(tmp_path: Path) -> None:
    """Its actions are the head's, which are those of no bin; training is refused beforehand."""
    folder = checkpoint(tmp_path / "model", regresses=True)
    data = TABLE | {"policy": TABLE["policy"] | {"head": "l1"}, "rollout": SHORT}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(data))
    lanes = parse_lanes("cpu:1")
    figures = examine(Examination(Path(folder), recipe, limit=2, lanes=lanes))
    assert figures["length"] <= 2
    policy = EmbodiedExperiment(read_recipe(data, {"model": folder})).flow().actor.source.make()
    state = {"image": torch.zeros(1, 32, 32, 3, dtype=torch.uint8)}
    seen = state | {"instruction": ["reach the red ball"]}
    decided = policy.act(seen, seeds=[0], greedy=True)
    assert torch.equal(decided.actions, policy.scale(decided.tokens).clamp(-1, 1))
    with pytest.raises(UserError, match=r"policy.head.*cannot be trained.*m2flow eval"):
        train(data, {"model": folder}, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert "a tiny model has no regression head" in refused({"policy.head": "l1"})


# --- what is refused ----------------------------------------------------------------------------


def test_groups_larger_than_the_rollouts_are_refused() -> None:
    line = refused(
        {"algorithm": {"name": "grpo", "group_size": 8}, "rollout.automatic_reset": False}
    )
    assert "algorithm.group_size: a group is larger" in line
    assert "at most rollouts_per_step = 4" in line


def test_pictures_and_tasks_that_are_not_there_are_refused() -> None:
    assert "has no such picture (got 'wrist_image'); expected 'image'" in refused(
        {"policy.cameras": ["wrist_image"]}
    )
    assert "policy.cameras: is wrong (got []); expected at least 1 item" in refused(
        {"policy.cameras": []}
    )
    assert "did you mean 'reach'" in refused({"environment.name": "table:reech"})
    assert "did you mean 'table'" in refused({"environment.name": "tabel:reach"})
    line = refused({"environment.name": "gymnasium:CartPole-v1"})
    assert "has no instructions" in line


@pytest.mark.parametrize("kind", ["openvla", "pi0"])
def test_a_tiny_model_wants_pictures_of_a_patch_or_more(kind: str) -> None:
    """A convolution raised on the lane."""
    line = refused({"policy": {"kind": kind}, "environment.options.pixels": 7})
    assert "policy.cameras: the pictures of a tiny model are too small (got 7)" in line
    assert "at least 8 pixels of height" in line


def test_who_decodes_one_action_has_no_chunk() -> None:
    """It was said when the weights had been read, of keys that no recipe has."""
    line = refused({"policy": {"kind": "openvla", "chunk": 4}})
    assert "policy.chunk: openvla decodes the tokens of one action (got 4)" in line
    assert "policy.kind: openvla-oft" in line


@needs_vla
def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused({"model": str(tmp_path / "nowhere")})
    folder = checkpoint(tmp_path / "fits")
    line = refused({"model": folder, "policy.statistics": "bridge_orig"})
    assert "bridge_orig" in line
    assert "one of: tiny" in line
    assert "expected 2" in refused({"model": checkpoint(tmp_path / "seven", actions=7)})
    line = refused({"model": checkpoint(tmp_path / "wide", end=3.0)})
    assert "bounds of actions do not fit" in line


@needs_vla
@pytest.mark.parametrize(("scaled", "fits"), [(0, True), (32, True), (2, True), (7, False)])
def test_pi0_knows_how_large_its_states_were(
    scaled: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from m2flow.models.policies import flow_matching

    loaded: Any = torch.nn.Module()
    loaded.model = torch.nn.Module()
    loaded.model.config = SimpleNamespace(max_state_dim=32)
    loaded.options = SimpleNamespace(state_mean=(0.0,) * scaled)
    monkeypatch.setattr(flow_matching, "load_pi0", lambda *_: loaded)
    changes = {"model": str(tmp_path), "policy": {"kind": "pi0", "chunk": 2, "lora_rank": 0}}
    if fits:
        EmbodiedExperiment(read_recipe(TABLE, changes))
    else:
        assert "state has another size" in refused(changes)


@needs_vla
def test_parts_of_a_checkpoint_that_would_not_be_read_are_refused(tmp_path: Path) -> None:
    """The network alone says nothing that it was trained to say."""
    folder = checkpoint(tmp_path / "model", regresses=True)
    line = refused({"model": folder})
    assert "was trained with its action_head" in line
    assert line.startswith("policy.head: ")
    assert "expected l1" in line
    line = refused({"model": folder, "policy.kind": "openvla", "policy.chunk": 1})
    assert "expected openvla-oft" in line
    (tmp_path / "model" / "proprio_projector--150000_checkpoint.pt").touch()
    line = refused({"model": folder, "policy.head": "l1"})
    assert line.startswith("policy.proprioception: ")


@needs_vla
def test_checkpoints_of_another_family_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    line = refused({"model": folder, "policy.kind": "pi0"})
    assert "another family" in line
    assert "set policy.kind to openvla" in line
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "pi0"}))
    line = refused({"model": folder})
    assert "another family" in line
    assert "set policy.kind to pi0" in line
