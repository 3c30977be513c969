"""Whole steps with other architectures, and answers that end at a string."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
)

from m2flow.errors import UserError
from m2flow.flow import Place
from m2flow.models.tokenizer import character_tokenizer
from m2flow.plan import parse_lanes
from m2flow.runtime.driver.launch import launch
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.evaluation import examine
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.supported import check_model
from m2flow.workloads.reasoning.workers import Generator, ModelSource

ALONE = parse_lanes("cpu:1")
CHARACTERS = "0123456789+=#,"
_ENDS = {"vocab_size": 16, "eos_token_id": 14, "pad_token_id": 15, "bos_token_id": None}
_SIZES: dict[str, Any] = {
    **_ENDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "sliding_window": 5, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "gemma2": lambda: Gemma2Config(**_SIZES, attn_logit_softcapping=5.0),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, sliding_window_pattern=2),
    "gpt2": lambda: GPT2Config(**_ENDS, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


def folder_of(name: str, path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MODELS[name]())
    model.save_pretrained(path)
    character_tokenizer(CHARACTERS).save_pretrained(path)
    return path


def recipe_of(folder: Path, **more: Any) -> ReasoningRecipe:
    return ReasoningRecipe.model_validate(
        {
            "steps": 2,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "minibatches": 1,
            "model": {"path": str(folder)},
            "training": {"drop_zero_advantage": False, "tokens_per_microbatch": 128},
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
            "generation": {"max_new_tokens": 12},
            **more,
        }
    )


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_keep_engine_and_trainer_together(name: str, tmp_path: Path) -> None:
    """What was drawn is what is trained on, before an update is published and after."""
    folder = folder_of(name, tmp_path / "model")
    recipe = recipe_of(folder)
    experiment = ReasoningExperiment(recipe)
    flow = recipe_flow(recipe, experiment.model, experiment.rewards)
    with launch(flow, items_per_step=4, mode="eager") as run:
        for step in range(2):
            figures = experiment.metrics(run.step(experiment.batch(step)))
            assert figures["train/engine_gap"] < 1e-4
            assert figures["tokens/generated"] > 16


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_with_a_critic(name: str, tmp_path: Path) -> None:
    """Of Gemma 3 transformers has no class for critics, and GPT-2's head has a name of its own."""
    recipe = recipe_of(folder_of(name, tmp_path / "model"), algorithm={"name": "ppo"})
    experiment = ReasoningExperiment(recipe)
    flow = recipe_flow(recipe, experiment.model, experiment.rewards)
    with launch(flow, items_per_step=4, mode="eager") as run:
        for step in range(2):
            figures = experiment.metrics(run.step(experiment.batch(step)))
            assert figures["critic/tokens_computed"] > 16


def test_generation_may_compute_in_a_dtype_of_its_own(tmp_path: Path) -> None:
    """And how far that is from training is seen."""
    folder = folder_of("gemma3", tmp_path / "model")
    recipe = recipe_of(
        folder,
        model={"path": str(folder), "dtype": "float32"},
        generation={"max_new_tokens": 12, "dtype": "bfloat16"},
    )
    experiment = ReasoningExperiment(recipe)
    flow = recipe_flow(recipe, experiment.model, experiment.rewards)
    with launch(flow, items_per_step=4, mode="eager") as run:
        for step in range(2):
            figures = experiment.metrics(run.step(experiment.batch(step)))
            assert 1e-4 < figures["train/engine_gap"] < 0.1
        assert flow.generator.engine._decoder.dtype is torch.bfloat16  # type: ignore[union-attr]
        assert {x.dtype for x in flow.learner.policy.parameters()} == {torch.float32}


def test_samples_know_the_version_of_each_token(tmp_path: Path) -> None:
    folder = folder_of("gemma3", tmp_path / "model")
    recipe = recipe_of(folder)
    experiment = ReasoningExperiment(recipe)
    generator = Generator(ModelSource(str(folder)), samples_per_prompt=2, max_new_tokens=9)
    generator.load(Place(spill=tmp_path, version=5))
    batches = list(generator.generate(experiment.batch(0)))
    samples = [row for batch in batches for row in map(batch.row, range(len(batch)))]
    assert len(samples) == 8
    for row in samples:
        assert len(row["token_versions"]) == len(row["completion_ids"])
        assert set(row["token_versions"].tolist()) == {5}
        assert row["version"] == (5, 5)


def test_answers_end_at_a_string_of_the_recipe_and_of_an_evaluation(tmp_path: Path) -> None:
    folder = folder_of("gemma3", tmp_path / "model")
    source, tokenizer = ModelSource(str(folder)), character_tokenizer(CHARACTERS)
    batch = ReasoningExperiment(recipe_of(folder)).batch(0)

    def texts(stop: tuple[str, ...]) -> list[tuple[str, str]]:
        generator = Generator(source, samples_per_prompt=8, max_new_tokens=20, stop=stop)
        generator.load(Place(spill=tmp_path))
        found: dict[int, tuple[str, str]] = {}
        for some in filter(len, generator.generate(batch)):
            rows = zip(some.ids, some["completion_ids"].rows(), some["finish_reason"], strict=True)
            found |= {
                i: (tokenizer.decode(ids.tolist(), skip_special_tokens=True), reason)
                for i, ids, reason in rows
            }
        return [found[i] for i in sorted(found)]

    stop = ("1", "22")
    ended = 0
    for (free, reason), (text, why) in zip(texts(()), texts(stop), strict=True):
        ends = [free.index(one) + len(one) for one in stop if one in free]
        assert text == free[: min(ends)] if ends else free
        assert why == ("stop" if ends else reason)
        ended += bool(ends)
    assert ended > 8
    data = tmp_path / "problems.jsonl"
    data.write_text(json.dumps({"question": "1+2", "answer": 3}) + "\n")
    asked = Examination(
        folder, data, template="{question}=", max_new_tokens=20, samples=16, lanes=ALONE
    )
    stopped = examine(replace(asked, stop=tuple("0123456")))
    assert stopped["mean_tokens"] < examine(asked)["mean_tokens"]
    assert stopped["truncated_share"] == 0.0


@pytest.mark.parametrize("stop", [[""], "", {"a": 1}])
def test_a_stop_that_is_no_string_is_refused(stop: Any) -> None:
    with pytest.raises((UserError, ValueError), match="stop"):
        ReasoningRecipe.model_validate({"generation": {"stop": stop}})


def test_one_stop_string_needs_no_list() -> None:
    recipe = ReasoningRecipe.model_validate({"generation": {"stop": "\n\n"}})
    assert recipe.generation.stop == ("\n\n",)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_model_that_is_not_packed_is_refused_whoever_generates(
    engine: str, tmp_path: Path
) -> None:
    """Rows of a pack would attend to each other: log-probabilities were off by 4."""
    BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    recipe = recipe_of(tmp_path, generation={"engine": engine})
    with pytest.raises(UserError, match="cannot be packed") as caught:
        check_model(recipe)
    assert (caught.value.key, caught.value.value) == ("model.path", str(tmp_path))
