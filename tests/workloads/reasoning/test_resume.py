"""A run that goes on from a checkpoint is the run that was never stopped, whatever the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.flow import Place
from m2flow.flow.graph import FlowGraph
from m2flow.models.causal_lm import load_model
from m2flow.plan import build_plan, parse_lanes
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.training import trainer_state
from m2flow.workloads.common.resume import MAY_CHANGE, check_directory
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import saved
from m2flow.workloads.reasoning.workers import Critic, ModelSource

MakeRecipe = Any

STEPS, STOP = 4, 2

VARIANTS: dict[str, dict[str, Any]] = {
    "quick start": {},
    "a schedule": {"optimizer": {"schedule": "cosine", "warmup_steps": 3, "learning_rate": 3e-3}},
    "a reference": {"algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}},
    "old log-probabilities": {"training": {"recompute_logprobs": True}, "minibatches": 4},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "a critic": {"algorithm": {"name": "ppo"}, "samples_per_prompt": 1, "prompts_per_step": 16},
    "further draws": {"algorithm": {"name": "dapo"}},
    "answers that go on": {"generation": {"max_new_tokens": 6, "tokens_per_step": 4}},
}


@dataclass(frozen=True)
class Stretch:
    """Some steps of a run: their rewards and loss figures, and the weights at their end."""

    rewards: list[list[float]]
    metrics: list[dict[str, float]]
    versions: list[int]
    staleness: list[float | None]
    weights: dict[str, Tensor]


def stretch(
    recipe: ReasoningRecipe,
    model: ModelSource,
    folder: Path,
    first: int,
    last: int,
    checkpoint: Path | None = None,
    ahead: LanePool | None = None,
) -> Stretch:
    """Steps first to last - 1, saved at the end; everything is made anew, as in a new process.

    Where generation runs ahead, on one of these lanes, there is a checkpoint at `STOP`, too.
    """
    experiment = ReasoningExperiment(recipe, model)
    flow = experiment.flow(checkpoint)
    num_items = recipe.prompts_per_step
    plan = one_step_ahead(flow.trace(), num_items) if ahead else None
    lanes = ahead or "cpu:1"
    pauses = [STOP] if ahead and first < STOP < last else []
    results = []
    with launch(flow, items_per_step=num_items, first_step=first, lanes=lanes, plan=plan) as run:
        for start, end in pairwise([first, *pauses, last]):
            for result in run.steps(experiment.batch(step) for step in range(start, end)):
                experiment.note(result)
                results.append(result)
            experiment.save(run, folder, end)
        weights = {
            f"{name}/{parameter}": tensor
            for name in ("learner", "critic")
            if name in flow.workers
            for parameter, tensor in run.worker_call(name, "parameters").items()
        }
    return Stretch(
        rewards=[result.output["reward"] for result in results],
        metrics=[result.metrics for result in results],
        versions=[result.version for result in results],
        staleness=[result.staleness for result in results],
        weights=weights,
    )


def one_step_ahead(graph: FlowGraph, num_items: int) -> Plan:
    """Answers are drawn in one call a step, beside the training of the step before.

    So all of a step are drawn with weights that are one version old, however long calls take.
    """
    plan = build_plan("disaggregated", graph, parse_lanes("cpu:2"), num_items)
    return replace(plan, stages={}, edges={}, order=(), max_staleness=1)


@pytest.fixture(params=VARIANTS)
def recipe(request: pytest.FixtureRequest, tiny_recipe: MakeRecipe) -> Iterator[ReasoningRecipe]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_recipe(**VARIANTS[request.param])
    torch.set_num_threads(threads)


def test_stopped_and_resumed(recipe: ReasoningRecipe, warmed: ModelSource, tmp_path: Path) -> None:
    model = ModelSource(warmed.path, recipe.model.dtype)
    straight = stretch(recipe, model, tmp_path / "straight", 0, STEPS)
    before = stretch(recipe, model, tmp_path / "parts", 0, STOP)
    checkpoint = tmp_path / "parts" / f"step_{STOP:06d}"
    after = stretch(recipe, model, tmp_path / "parts", STOP, STEPS, checkpoint)
    assert before.rewards + after.rewards == straight.rewards
    assert before.metrics + after.metrics == straight.metrics
    assert before.versions + after.versions == straight.versions == [1, 2, 3, 4]
    assert straight.weights.keys() == after.weights.keys()
    for name, value in straight.weights.items():
        assert value.equal(after.weights[name]), name
    assert any(not value.equal(before.weights[name]) for name, value in straight.weights.items())
    assert sum(metrics["grad_norm"] > 0 for metrics in straight.metrics) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["quick start", "a critic"])
def test_resumed_from_lanes_of_which_the_first_does_not_train(
    variant: str, tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path
) -> None:
    """All four join one world, and those that train are the last two."""
    recipe = tiny_recipe(**VARIANTS[variant])
    experiment = ReasoningExperiment(recipe, warmed)
    flow, items = experiment.flow(None), recipe.prompts_per_step
    lanes = [LaneSpec(number) for number in range(4)]
    plan = build_plan("disaggregated", flow.trace(), lanes, items)
    assert plan.placements["learner"].replicas == ((2,), (3,))
    with launch(flow, items_per_step=items, plan=plan, num_threads=1) as run:
        experiment.note(run.step(experiment.batch(0)))
        experiment.save(run, tmp_path, 1)
        weights = run.worker_call("learner", "parameters")
    saved_to = tmp_path / "step_000001"
    written = load_model(saved_to / "model").state_dict()
    assert all(tensor.equal(weights[name]) for name, tensor in written.items())
    assert stretch(recipe, warmed, tmp_path, 1, 2, saved_to).versions == [2]


def test_a_critic_reads_no_state_but_its_own(
    tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(**VARIANTS["a critic"])
    stretch(recipe, warmed, tmp_path, 0, 1)
    checkpoint, opened = tmp_path / "step_000001", []

    class Watched(trainer_state.SavedState):
        def __init__(self, folder: Path) -> None:
            opened.append(folder)
            super().__init__(folder)

    monkeypatch.setattr(trainer_state, "SavedState", Watched)
    model = saved(recipe, warmed, checkpoint, Critic.part)
    Critic(model, recipe, str(checkpoint)).load(Place())
    assert opened == [checkpoint / Critic.part / "trainer"]


def test_resumed_with_generation_a_step_ahead(
    tiny_recipe: MakeRecipe, warmed: ModelSource, two_lanes: LanePool, tmp_path: Path
) -> None:
    """A checkpoint waits for all that is under way, so the step after it begins on new weights."""
    recipe = tiny_recipe(max_staleness=1, model={"dtype": "float64"})
    model = ModelSource(warmed.path, "float64")
    straight = stretch(recipe, model, tmp_path, 0, STEPS, ahead=two_lanes)
    checkpoint = tmp_path / f"step_{STOP:06d}"
    after = stretch(recipe, model, tmp_path, STOP, STEPS, checkpoint, ahead=two_lanes)
    assert straight.staleness == [0, 1] * 2
    assert after.staleness == straight.staleness[STOP:]
    assert after.rewards == straight.rewards[STOP:]
    assert after.versions == straight.versions[STOP:]
    for name, value in straight.weights.items():
        torch.testing.assert_close(after.weights[name], value, rtol=1e-9, atol=1e-9)


FREELY: dict[str, Any] = {
    "training": {
        "tokens_per_microbatch": 512, "sharing": "prefix", "gradient_checkpointing": False,
        "optimizer_on_host": False, "fused_kernels": None,
    },
    "generation": {"max_running": 256, "cache_gb": None, "captured_decode": True},
}  # fmt: skip
LEAN: dict[str, Any] = {
    "training": {
        "tokens_per_microbatch": 40, "sharing": "none", "gradient_checkpointing": True,
        "optimizer_on_host": True, "fused_kernels": False,
    },
    "generation": {"max_running": 3, "cache_gb": 2e-5, "captured_decode": False},
}  # fmt: skip


@pytest.mark.parametrize(
    "variant", ["quick start", pytest.param("a critic", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_with_settings_that_need_less_memory_and_back(
    variant: str, tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path, one_thread: None
) -> None:
    """The same answers are drawn; weights differ by rounding."""
    more, less = (
        tiny_recipe(model={"dtype": "float64"}, **{**VARIANTS[variant], **settings})
        for settings in (FREELY, LEAN)
    )
    for section, settings in LEAN.items():
        assert settings.keys() <= {key.partition(".")[2] for key in MAY_CHANGE if section in key}
    model = ModelSource(warmed.path, "float64")
    straight = stretch(more, model, tmp_path / "straight", 0, STEPS)
    for name, first, last in (("down", more, less), ("up", less, more)):
        folder = tmp_path / name
        begun = stretch(first, model, folder, 0, STOP)
        (folder / "config.yaml").write_text(json.dumps(first.model_dump(mode="json")))
        check_directory(last, folder, resume=True)
        after = stretch(last, model, folder, STOP, STEPS, folder / f"step_{STOP:06d}")
        assert begun.rewards + after.rewards == straight.rewards
        assert after.weights.keys() == straight.weights.keys()
        for parameter, value in straight.weights.items():
            torch.testing.assert_close(after.weights[parameter], value, rtol=1e-7, atol=1e-9)
    assert any(not x.equal(begun.weights[name]) for name, x in straight.weights.items())


def test_the_trainer_s_state_matters(
    tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path
) -> None:
    """The weights alone do not make the same run: or the test above would prove little."""
    recipe = tiny_recipe()
    straight = stretch(recipe, warmed, tmp_path, 0, STEPS)
    stretch(recipe, warmed, tmp_path, 0, STOP)
    saved = ModelSource(str(tmp_path / f"step_{STOP:06d}" / "model"))
    after = stretch(recipe, saved, tmp_path, STOP, STEPS)
    assert any(not value.equal(after.weights[name]) for name, value in straight.weights.items())
