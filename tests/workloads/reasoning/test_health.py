"""Warnings: each figure beyond its bound is said with what helps; a healthy step says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from m2flow.workloads.reasoning.health import CHECKS, hints

MakeRecipe = Any

HEALTHY = {
    "accuracy/mean": 0.4,
    "reward/zero_variance_share": 0.5,
    "length/truncated_share": 0.02,
    "reward/failed_share": 0.0,
    "train/engine_gap": 0.01,
    "train/engine_gap_max": 0.8,
    "train/engine_kl": 0.001,
    "train/ratio_outliers": 0.01,
    "train/behaviour_entropy": 0.4,
    "train/grad_norm": 0.7,
    "critic/explained_variance": 0.2,
}


def test_a_healthy_step_says_nothing(tiny_recipe: MakeRecipe) -> None:
    assert hints(HEALTHY, tiny_recipe()) == {}
    assert hints({}, tiny_recipe()) == {}


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"reward/zero_variance_share": 0.95}, "95% of the groups .* easier problems"),
        (
            {"reward/zero_variance_share": 0.95, "accuracy/mean": 0.97},
            "95% of the groups .* harder problems",
        ),
        ({"length/truncated_share": 0.5}, "50% .* generation.max_new_tokens = 6: raise it"),
        ({"reward/failed_share": 0.2}, "20% .* samples.jsonl"),
        ({"train/engine_gap": 0.3}, "0.3 apart .* one dtype"),
        ({"train/engine_gap_max": 9.0}, "one token .* 9 from training's.*generation.engine"),
        ({"train/engine_kl": 0.5}, "KL 0.5 a token.*recompute_logprobs"),
        ({"train/ratio_outliers": 0.2}, "20% of the tokens .*learning_rate"),
        ({"train/behaviour_entropy": 0.001}, "hardly varies .*0.001 nats.*clip_high"),
        ({"train/grad_norm": 5000.0}, "norm is 5e\\+03"),
        ({"critic/explained_variance": -3.0}, "misleads .*-3.00.* critic.warmup_steps"),
    ],
)
def test_each_figure_beyond_its_bound_is_said(
    tiny_recipe: MakeRecipe, figures: dict[str, float], said: str
) -> None:
    import re

    (hint,) = hints(HEALTHY | figures, tiny_recipe()).values()
    assert re.search(said, hint)


@pytest.mark.parametrize("figure", ["train/engine_gap", "train/engine_kl"])
def test_nobody_is_told_to_set_what_is_set(tiny_recipe: MakeRecipe, figure: str) -> None:
    figures = HEALTHY | {figure: 0.5}
    weighed = {"recompute_logprobs": True}
    (hint,) = hints(figures, tiny_recipe()).values()
    assert "training.recompute_logprobs" in hint
    (hint,) = hints(figures, tiny_recipe(training=weighed)).values()
    assert "recompute_logprobs" not in hint
    assert "algorithm.gap_cap" in hint
    assert "one dtype" in hint


@pytest.mark.parametrize("figure", ["train/engine_gap", "train/engine_kl"])
@pytest.mark.parametrize(("key", "value"), [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
def test_a_gap_that_the_recipe_asks_for_is_said_so(
    tiny_recipe: MakeRecipe, figure: str, key: str, value: float
) -> None:
    """Which tokens are drawn from, no dtype changes."""
    recipe = tiny_recipe(generation={key: value})
    (hint,) = hints(HEALTHY | {figure: 0.5}, recipe).values()
    assert f"generation.{key}" in hint
    assert "dtype" not in hint


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_steps_whose_tokens_are_masked_are_said(tiny_recipe: MakeRecipe, level: str) -> None:
    recipe = tiny_recipe(
        training={"recompute_logprobs": True}, algorithm={"gap_rule": "mask", "gap_level": level}
    )
    assert hints(HEALTHY | {"train/gap_masked": 0.5}, recipe) == {}
    (hint,) = hints(HEALTHY | {"train/gap_masked": 1.0}, recipe).values()
    assert "100% of the tokens" in hint
    assert "raise algorithm.gap_cap = 5" in hint
    assert ("algorithm.gap_level: token" in hint) == (level == "sequence")
    assert "algorithm.gap_rule: truncate" in hint


def test_a_tool_that_fails_is_not_the_function_that_gives_rewards(tiny_recipe: MakeRecipe) -> None:
    """The hint named the reward's function where tools alone had failed."""
    failed = HEALTHY | {"reward/failed_share": 0.25}
    assert hints(failed | {"tools/failed_share": 0.25}, tiny_recipe()) == {}
    (hint,) = hints(failed | {"tools/failed_share": 0.125}, tiny_recipe()).values()
    assert "the function failed" in hint


def test_a_batch_that_is_not_full_is_said(tiny_recipe: MakeRecipe) -> None:
    figures = HEALTHY | {"sampling/unfilled_share": 0.25}
    assert hints(figures, tiny_recipe()) == {}, "nobody asked for more"
    (hint,) = hints(figures, tiny_recipe(algorithm={"name": "dapo", "further_draws": 2})).values()
    assert "25% of the groups" in hint
    assert "after 2 other prompts" in hint


def test_a_policy_that_is_right_may_be_sure(tiny_recipe: MakeRecipe) -> None:
    sure = {"train/behaviour_entropy": 0.001, "accuracy/mean": 0.98}
    assert hints(HEALTHY | sure, tiny_recipe()) == {}


def test_every_figure_that_is_looked_at_is_documented() -> None:
    from pathlib import Path

    reference = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
    text = reference.read_text()
    assert all(f"`{check.figure}`" in text for check in CHECKS)


def test_a_policy_that_stands_still_in_the_whole_run_is_said(tiny_recipe: MakeRecipe) -> None:
    figures = HEALTHY | {"samples": 8.0}
    ppo: dict[str, Any] = {"algorithm": {"name": "ppo"}, "samples_per_prompt": 1, "steps": 4}
    assert hints(figures, tiny_recipe(**ppo, critic={"warmup_steps": 3})) == {}
    (hint,) = hints(figures, tiny_recipe(**ppo, critic={"warmup_steps": 4})).values()
    assert "in all 4 steps (critic.warmup_steps: 4)" in hint
