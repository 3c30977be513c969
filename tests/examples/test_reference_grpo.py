"""The single-file reference and m2flow are the same algorithm: data, seeds, rewards and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.qwen2 import modeling_qwen2

from m2flow.algorithms import sampling
from m2flow.models.causal_lm import load_model
from m2flow.models.tokenizer import character_tokenizer
from m2flow.runtime.driver.launch import launch
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.tasks.addition import CHARACTERS, Addition
from m2flow.workloads.reasoning.workers import ModelSource

STEPS = 4


@pytest.fixture(scope="module")
def reference(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("reference_grpo")


@pytest.fixture(scope="module")
def experiment() -> ReasoningExperiment:
    """A model so small, on sums of one or two digits, that seconds of warm-up earn some rewards."""
    return ReasoningExperiment(
        ReasoningRecipe.model_validate(
            {
                "seed": 3,
                "steps": STEPS,
                "prompts_per_step": 8,
                "samples_per_prompt": 8,
                "minibatches": 2,
                "model": {
                    "dtype": "float64",
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "intermediate_size": 96,
                },
                "data": {"options": {"min_digits": 1, "max_digits": 2}},
                "warmup": {"steps": 300},
                "algorithm": {"clip_high": 0.28, "aggregation": "token-mean"},
                "optimizer": {"learning_rate": 1e-3},
            }
        )
    )


@pytest.fixture(scope="module")
def checkpoint(experiment: ReasoningExperiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    experiment.prepare(folder)
    return folder


@pytest.fixture
def norms_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rounds to float32 inside every norm, whatever the model's dtype.

    m2flow widens the norms of its own float64 models; the reference, which imports nothing of it,
    has them as transformers makes them.
    """

    def widened(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        mean_square = hidden.pow(2).mean(-1, keepdim=True)
        return norm.weight * (hidden * torch.rsqrt(mean_square + norm.variance_epsilon))

    monkeypatch.setattr(modeling_qwen2.Qwen2RMSNorm, "forward", widened)


def run_both(
    reference: ModuleType, experiment: ReasoningExperiment, checkpoint: Path
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(rewards of each step, final weights): of m2flow's eager run, and of the reference."""
    recipe = experiment.recipe
    model = ModelSource(str(checkpoint), "float64")
    flow = recipe_flow(recipe, model, experiment.rewards)
    with launch(flow, items_per_step=recipe.prompts_per_step, mode="eager", num_threads=1) as run:
        batches = [experiment.batch(step) for step in range(STEPS)]
        rewards = [result.output["reward"] for result in run.steps(batches)]
        weights = run.worker_call("learner", "parameters")
    settings = reference.Settings(
        steps=STEPS,
        seed=recipe.seed,
        checkpoint=checkpoint,
        dtype="float64",
        min_digits=1,
        max_digits=2,
        prompts_per_step=recipe.prompts_per_step,
        samples_per_prompt=recipe.samples_per_prompt,
        learning_rate=recipe.optimizer.learning_rate,
        eval_problems=0,
    )
    return (rewards, weights), reference.run(settings, log=lambda line: None)


@pytest.mark.usefixtures("norms_in_double")
def test_weights_are_those_of_an_eager_run(
    reference: ModuleType, experiment: ReasoningExperiment, checkpoint: Path
) -> None:
    (rewards, weights), (their_rewards, their_weights) = run_both(reference, experiment, checkpoint)
    assert rewards == their_rewards
    assert 0 < sum(map(sum, rewards)) < STEPS * experiment.recipe.samples_per_step
    before = load_model(checkpoint, torch.float64).state_dict()
    assert distance(weights, before) > 1e-3
    assert distance(weights, their_weights) < 1e-9


def test_weights_are_those_of_an_eager_run_with_transformers_norms(
    reference: ModuleType, experiment: ReasoningExperiment, checkpoint: Path
) -> None:
    (rewards, weights), (their_rewards, their_weights) = run_both(reference, experiment, checkpoint)
    assert rewards == their_rewards
    assert distance(weights, their_weights) < 1e-3


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor, relative to the tensor's largest entry."""
    assert some.keys() == others.keys()
    return max(
        float((tensor - others[name]).abs().max() / others[name].abs().max())
        for name, tensor in some.items()
    )


@pytest.mark.usefixtures("norms_in_double")
def test_warm_up_is_m2flows(reference: ModuleType, tmp_path: Path) -> None:
    recipe = ReasoningRecipe.model_validate(
        {
            "seed": 5,
            "model": {"dtype": "float64"},
            "data": {"options": {"thinking_share": 0.4}},
            "warmup": {"steps": 10, "samples_per_step": 4},
        }
    )
    ReasoningExperiment(recipe).prepare(tmp_path)
    ours = load_model(tmp_path, torch.float64)
    settings = reference.Settings(
        seed=5, dtype="float64", warmup_steps=10, warmup_samples_per_step=4
    )
    theirs = reference.new_model(settings)
    reference.warm_up(theirs, settings)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("digits", [(3, 4), (1, 1)])
def test_data_are_m2flows(reference: ModuleType, digits: tuple[int, int]) -> None:
    settings = reference.Settings(seed=7, min_digits=digits[0], max_digits=digits[1])
    task = Addition(
        seed=7,
        min_digits=digits[0],
        max_digits=digits[1],
        thinking_share=settings.thinking_share,
    )

    def content(problem: Any) -> tuple[str, str]:
        return problem.prompt, problem.answer

    for index in range(300):
        assert reference.demonstration(settings, index) == task.demonstration(index)
        assert content(reference.training_problem(settings, index)) == content(task.train(index))
    held_out = reference.held_out_problems(settings)
    assert list(map(content, held_out)) == list(map(content, task.held_out(512)))


def test_tokens_are_m2flows(reference: ModuleType) -> None:
    tokenizer = character_tokenizer(CHARACTERS)
    text = "347+285=12,13,06#632"
    assert reference.encode(text) == tokenizer(text)["input_ids"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (reference.EOS, reference.PAD)
    assert reference.decode([*reference.encode(text), reference.EOS]) == text


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_random_numbers_are_m2flows(reference: ModuleType, seed: int) -> None:
    for number in (0, 1, 7):
        assert reference.derive_seed(seed, number) == sampling.derive_seed(seed, number)
        drawn = sampling.uniform(torch.tensor([seed]), torch.tensor([number]))
        assert reference.uniform(seed, number) == float(drawn)


def test_command_line_sets_every_field(reference: ModuleType) -> None:
    settings = reference.settings_from(["--steps", "2", "--checkpoint", "here", "--dtype", "x"])
    expected = reference.Settings(steps=2, checkpoint=Path("here"), dtype="x")
    assert settings == expected
    assert dataclasses.fields(settings) == dataclasses.fields(expected)
