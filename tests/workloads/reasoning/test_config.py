"""The recipe's model: every default in one place, nothing coerced, sizes that fit each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from m2flow.algorithms.ppo import CriticLoss
from m2flow.errors import UserError
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.reasoning.algorithm_section import (
    ALGORITHMS,
    KEYS_OF_ALGORITHMS,
    AlgorithmSection,
)
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.data_section import KEYS_OF_TASKS, CurriculumPart, DataSection
from m2flow.workloads.reasoning.flow import PPO, recipe_flow
from m2flow.workloads.reasoning.learning import (
    critic_config,
    critic_loss_of,
    loss_of,
    trainer_config,
)
from m2flow.workloads.reasoning.workers import ModelSource


def refusal(data: dict[str, Any]) -> UserError:
    """The user's mistake inside of pydantic's error."""
    with pytest.raises(ValidationError) as caught:
        ReasoningRecipe.model_validate(data)
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, UserError)
    return error


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [field.annotation for field in model.model_fields.values()]
    return [
        model,
        *(kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)),
    ]


def test_nothing_needs_to_be_given() -> None:
    recipe = ReasoningRecipe()
    assert recipe == ReasoningRecipe.model_validate({})
    for section in sections(ReasoningRecipe):
        assert not [name for name, field in section.model_fields.items() if field.is_required()]


def test_what_is_written_is_read_back() -> None:
    recipe = ReasoningRecipe.model_validate(
        {
            "seed": 3,
            "optimizer": {"betas": [0.8, 0.9], "max_grad_norm": None},
            "logger": ["jsonl", "tensorboard"],
            "data": {"task": "gym", "dataset": "chain_sum", "options": {"min_terms": 2}},
        }
    )
    text = yaml.safe_dump(recipe.model_dump(mode="json"))
    assert ReasoningRecipe.model_validate(yaml.safe_load(text)) == recipe


def test_a_recipe_does_not_change() -> None:
    recipe = ReasoningRecipe()
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.model.hidden_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("section", sections(ReasoningRecipe), ids=lambda section: section.__name__)
def test_a_truth_value_is_no_number_and_a_number_is_no_truth_value(
    section: type[BaseModel],
) -> None:
    """`steps: yes` must not train for one step."""
    for name, field in section.model_fields.items():
        default = field.default
        if isinstance(default, bool):
            wrong: list[object] = [1, 0, "yes"]
        elif isinstance(default, int):
            wrong = [True, "3", 3.5, None]
        elif isinstance(default, float):
            wrong = [True, "3", float("nan"), float("inf")]
            wrong += [-1] if name != "weight" else []  # a penalty weighs less than nothing
        else:
            continue
        for value in wrong:
            if value is None and type(None) in getattr(field.annotation, "__args__", ()):
                continue
            with pytest.raises(ValidationError):
                section.model_validate({name: value})


def test_a_whole_number_may_stand_where_a_fraction_could() -> None:
    recipe = ReasoningRecipe.model_validate({"generation": {"temperature": 2}})
    assert recipe.generation.temperature == 2.0


@given(
    prompts=st.integers(1, 40),
    samples=st.integers(2, 12),
    minibatches=st.integers(1, 12),
    steps=st.integers(1, 1000),
)
def test_batch_arithmetic(prompts: int, samples: int, minibatches: int, steps: int) -> None:
    sizes = {
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "minibatches": minibatches,
        "steps": steps,
    }
    total = prompts * samples
    if total % minibatches:
        line = str(refusal(sizes))
        for part in ("prompts_per_step", "samples_per_prompt", "minibatches", str(total)):
            assert part in line
        return
    derived = ReasoningRecipe.model_validate(sizes).derived()
    assert derived["samples_per_step"] == total
    assert derived["samples_per_minibatch"] * minibatches == total
    assert derived["optimizer_steps"] == steps * minibatches
    assert derived["prompts_total"] == steps * prompts


def test_a_group_of_one_has_nothing_to_compare() -> None:
    error = refusal({"samples_per_prompt": 1})
    assert (error.key, error.value, error.expected) == ("samples_per_prompt", 1, "at least 2")


@pytest.mark.parametrize("key", KEYS_OF_TASKS)
def test_every_key_of_the_data_belongs_to_a_task(key: str) -> None:
    values = {"on_bad_row": "skip", "max_prompt_tokens": 9, "curriculum": CurriculumPart()}
    value: Any = values.get(key, "x")
    for task in ("addition", "jsonl", "gym"):
        if task in KEYS_OF_TASKS[key]:
            data = DataSection.model_validate({"task": task, key: value})
            assert getattr(data, key) == value
        else:
            error = refusal({"data": {"task": task, key: value}})
            assert (error.key, error.value) == (f"data.{key}", value)
            assert KEYS_OF_TASKS[key][0] in str(error.hint)
    written = DataSection(task="addition").model_dump()
    assert DataSection.model_validate(written).task == "addition", "a default is no choice"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_has_steps_left_after_its_warm_up(schedule: str) -> None:
    def sizes(warmup_steps: int) -> dict[str, Any]:
        optimizer = {"schedule": schedule, "warmup_steps": warmup_steps}
        return {"steps": 5, "minibatches": 2, "optimizer": optimizer}

    assert refusal(sizes(10)).key == "optimizer.warmup_steps"
    recipe = ReasoningRecipe.model_validate(sizes(9))
    assert trainer_config(recipe).optimizer.schedule.total_steps == 10
    constant = ReasoningRecipe.model_validate({"steps": 1, "optimizer": {"warmup_steps": 99}})
    assert trainer_config(constant).optimizer.schedule.factor(0) == 1 / 99


def test_a_schedule_has_steps_left_after_the_critic_s_warm_up() -> None:
    def sizes(warmup_steps: int) -> dict[str, Any]:
        return {
            "steps": 40,
            "minibatches": 1,
            "algorithm": {"name": "ppo"},
            "critic": {"warmup_steps": 30},
            "optimizer": {"schedule": "linear", "warmup_steps": warmup_steps},
        }

    error = refusal(sizes(20))
    assert error.key == "optimizer.warmup_steps"
    assert "fewer than (steps - critic.warmup_steps) x minibatches x epochs = 10" in str(error)
    schedule = trainer_config(ReasoningRecipe.model_validate(sizes(9))).optimizer.schedule
    assert schedule.factor(29) == 0.0 < schedule.factor(39)


def test_every_setting_of_the_algorithm_reaches_the_loss() -> None:
    settings = {
        "surrogate": "clip",
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip": 3.0,
        "ratio_level": "sequence",
        "aggregation": "sequence-mean-token-sum",
        "kl_coefficient": 0.01,
        "kl_estimator": "k2",
        "entropy_coefficient": 0.02,
        "gap_level": "sequence",
        "gap_rule": "mask",
        "gap_cap": 3.0,
    }
    training = {"recompute_logprobs": True}  # or nothing is weighted by the gap
    recipe = ReasoningRecipe.model_validate({"algorithm": settings, "training": training})
    loss = loss_of(recipe)
    assert {name: getattr(loss, name) for name in settings} == settings
    assert loss.token_budget == recipe.generation.max_new_tokens
    others = {"scale", "truncated", "overlong_buffer", "epochs", "kl_in", *KEYS_OF_ALGORITHMS}
    known = {"name", *settings, *others}
    assert recipe.algorithm.model_dump().keys() == known, "or this test is too short"
    cispo = ReasoningRecipe.model_validate({"algorithm": {"surrogate": "cispo"}})
    assert loss_of(cispo).surrogate == "cispo"


def test_a_model_that_is_there_has_defaults_of_its_own(tmp_path: Path) -> None:
    """Answers, learning rate and micro-batches of real models, unless something else is said."""
    said = {"generation": {"top_k": 7}, "optimizer": {"learning_rate": 3e-6}}
    recipe = ReasoningRecipe.model_validate({"model": {"path": str(tmp_path)}, **said})
    assert (recipe.generation.max_new_tokens, recipe.generation.top_k) == (4096, 7)
    assert (recipe.optimizer.learning_rate, recipe.training.tokens_per_microbatch) == (3e-6, 16384)
    assert ReasoningRecipe.model_validate(recipe.model_dump()) == recipe
    tiny = ReasoningRecipe.model_validate(said)
    assert (tiny.generation.max_new_tokens, tiny.training.tokens_per_microbatch) == (24, 2048)
    agentic = AgenticRecipe.model_validate({"model": {"path": str(tmp_path)}})
    assert (agentic.generation.max_new_tokens, agentic.episode.max_tokens) == (1024, 8192)
    assert agentic.optimizer.learning_rate == 1e-6
    for kind in (ReasoningRecipe, AgenticRecipe):
        adapted = {"model": {"path": str(tmp_path), "lora_rank": 8}}
        assert kind.model_validate(adapted).optimizer.learning_rate == 2e-5
        assert kind.model_validate(adapted | said).optimizer.learning_rate == 3e-6
    ppo = {"model": {"path": str(tmp_path)}, "algorithm": {"name": "ppo"}}
    assert ReasoningRecipe.model_validate(ppo).critic.learning_rate == 1e-5
    slow = ReasoningRecipe.model_validate(ppo | {"critic": {"learning_rate": 1e-6}})
    assert slow.critic.learning_rate == 1e-6
    toy = ReasoningRecipe.model_validate({"algorithm": {"name": "ppo"}})
    assert toy.critic.learning_rate == 1e-3
    alone = ReasoningRecipe.model_validate({"model": {"lora_rank": 8}})
    assert alone.optimizer.learning_rate == ReasoningRecipe().optimizer.learning_rate


def test_the_estimator_of_the_kl_follows_from_where_it_is() -> None:
    def algorithm(**words: Any) -> AlgorithmSection:
        return AlgorithmSection.model_validate({"kl_coefficient": 0.1, **words})

    assert algorithm().kl_estimator_in_loss == "k3"
    assert algorithm(kl_estimator="k2").kl_estimator_in_loss == "k2"
    assert algorithm(kl_in="reward", kl_estimator="k1").kl_in_reward == 0.1
    words = {"kl_in": "reward", "kl_coefficient": 0.1}
    for wrong in ("k2", "k3"):
        error = refusal({"algorithm": {**words, "kl_estimator": wrong}})
        assert str(error).startswith("algorithm.kl_estimator: in a reward the gradient of k1")


def test_a_kl_in_the_reward_is_none_in_the_loss() -> None:
    algorithm = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    recipe = ReasoningRecipe.model_validate({"algorithm": algorithm})
    assert not loss_of(recipe).needs_reference
    flow = recipe_flow(recipe, ModelSource("nowhere"))
    assert (flow.kl_in_reward, flow.reference is None) == (0.1, False)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recipe_that_was_written_whole_is_read_as_it_was(name: str) -> None:
    """A name sets what is not said, and nothing that is: a resumed run reads every key."""
    recipe = ReasoningRecipe.model_validate({"algorithm": {"name": name, "clip_high": 0.5}})
    assert ReasoningRecipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert recipe.algorithm.clip_high == 0.5


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"name": "ppo", "scale": "group"}, "algorithm.scale"),
        ({"name": "reinforce++", "scale": "group"}, "algorithm.scale"),
        ({"truncated": "bootstrap"}, "algorithm.truncated"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "algorithm.kl_estimator"),
        ({"overlong_buffer": 25}, "algorithm.overlong_buffer"),
        ({"name": "reinforce++", "equal_groups": "drop"}, "algorithm.equal_groups"),
    ],
)
def test_what_does_not_go_together_is_refused(algorithm: dict[str, Any], key: str) -> None:
    assert refusal({"algorithm": algorithm}).key == key


@pytest.mark.parametrize(
    ("dtype", "training", "key"),
    [
        ("bfloat16", {"rounding": "stochastic", "optimizer_on_host": True}, "training.rounding"),
        ("float32", {"rounding": "stochastic", "moments": "8bit"}, "training.rounding"),
        ("float64", {"moments": "8bit"}, "training.moments"),
    ],
)
def test_what_torchao_does_not_step_is_refused(dtype: str, training: Any, key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        ReasoningRecipe.model_validate({"model": {"dtype": dtype}, "training": training})
    good = {key: value for key, value in training.items() if key != "optimizer_on_host"}
    ReasoningRecipe.model_validate({"model": {"dtype": "bfloat16"}, "training": good})


def test_every_setting_of_ppo_is_read() -> None:
    algorithm = {"name": "ppo", "gamma": 0.9, "lam": 0.5, "scale": "none", "clip_high": 0.1}
    data = {
        "algorithm": algorithm,
        "critic": {"learning_rate": 0.5, "value_clip": None, "warmup_steps": 3},
        "samples_per_prompt": 1,
        "optimizer": {"learning_rate": 0.25, "weight_decay": 0.125},
    }
    recipe = ReasoningRecipe.model_validate(data)
    assert loss_of(recipe).clip_high == 0.1
    assert critic_loss_of(recipe) == CriticLoss(None, "token-mean", token_budget=24)
    of_critic, of_policy = critic_config(recipe).optimizer, trainer_config(recipe).optimizer
    assert (of_critic.learning_rate, of_policy.learning_rate) == (0.5, 0.25)
    assert of_policy.schedule == replace(of_critic.schedule, idle_steps=3 * recipe.minibatches)
    assert of_critic == replace(of_policy, learning_rate=0.5, schedule=of_critic.schedule)
    flow = recipe_flow(recipe, ModelSource("nowhere"))
    assert isinstance(flow, PPO)
    assert (flow.gamma, flow.lam, flow.scale) == (0.9, 0.5, "none")
    assert recipe.critic.model_dump().keys() == data["critic"].keys(), "or this test is too short"


@pytest.mark.parametrize("key", KEYS_OF_ALGORITHMS)
def test_a_key_of_the_other_algorithm_is_refused(key: str) -> None:
    other = next(name for name in ALGORITHMS if name not in KEYS_OF_ALGORITHMS[key])
    default = AlgorithmSection.model_fields[key].default
    value: Any = "drop" if isinstance(default, str) else 0.5 if default is not None else 2
    error = refusal({"algorithm": {"name": other, key: value}})
    assert (error.key, error.value) == (f"algorithm.{key}", value)
    assert KEYS_OF_ALGORITHMS[key][0] in str(error.hint)
    AlgorithmSection.model_validate({"name": other, key: default})


def test_grpo_has_no_critic() -> None:
    error = refusal({"critic": {"learning_rate": 0.5}})
    assert (error.key, error.value) == ("critic", {"learning_rate": 0.5})


@pytest.mark.parametrize(
    ("key", "value"),
    [("gamma", 1.1), ("gamma", -0.1), ("lam", 2), ("lam", "a"), ("scale", 1), ("name", "pppo")],
)
def test_ppo_s_values_are_checked(key: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        ReasoningRecipe.model_validate({"algorithm": {"name": "ppo", key: value}})
    assert caught.value.errors()[0]["loc"][:2] == ("algorithm", key)


def test_a_profile_of_adapters_is_not_that_of_training_whole_models() -> None:
    from m2flow.workloads.reasoning.workload import WORKLOAD

    keys = [
        WORKLOAD.profile_key(ReasoningRecipe.model_validate({"model": model}))
        for model in ({"path": "models/x"}, {"path": "models/x", "lora_rank": 4})
    ]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"name": "rloo", "scale": "group"}, "algorithm.scale"),
        ({"name": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip"),
        ({"gap_cap": 2.0}, "algorithm.gap_cap"),
        ({"gap_rule": "mask"}, "algorithm.gap_rule"),
        ({"gap_level": "sequence"}, "algorithm.gap_level"),
    ],
)
def test_keys_that_nobody_reads_are_refused(algorithm: dict[str, Any], key: str) -> None:
    assert refusal({"algorithm": algorithm}).key == key


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"algorithm\.name"):
        ReasoningRecipe.model_validate({"algorithm": {"name": ["grpo"]}})
