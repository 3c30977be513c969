"""What the figures of a step say is wrong with a run, each with what to do about it.

Each check looks at the figures of one step alone. Bounds are wide: a run that learns passes them,
and what is told once is not told again by whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from m2flow.generation.supported import SAMPLERS
from m2flow.workloads.reasoning.config import ReasoningRecipe

Figures = Mapping[str, float]


class HealthCheck(NamedTuple):
    """One thing that may be wrong.

    Attributes:
        figure: that is looked at; no figure, nothing wrong.
        wrong: whether its value says so, in a recipe, beside the other figures.
        hint: what it means and what helps; `{value}` is the figure, `{recipe}` the recipe, `{cut}`
            where answers are cut and what helps there, `{closer}` what brings generation and
            training closer, `{looser}` what masks fewer tokens.
    """

    figure: str
    wrong: Callable[[float, ReasoningRecipe, Figures], bool]
    hint: str


def _all_right(figures: Figures) -> bool:
    return figures.get("accuracy/mean", 0.0) >= 0.5


CHECKS = (
    HealthCheck(
        "reward/zero_variance_share",
        lambda share, _, figures: share >= 0.9 and not _all_right(figures),
        "{value:.0%} of the groups have the same reward for all of their answers and teach "
        "nothing: take easier problems or more samples_per_prompt, or give part of the reward for "
        "less",
    ),
    HealthCheck(
        "reward/zero_variance_share",
        lambda share, _, figures: share >= 0.9 and _all_right(figures),
        "{value:.0%} of the groups have the same reward for all of their answers, most of them a "
        "full one: harder problems would teach more",
    ),
    HealthCheck(
        "sampling/unfilled_share",
        lambda share, recipe, _: share > 0 and recipe.further_draws > 0,
        "the batch is not full: {value:.0%} of the groups still have the same reward for all of "
        "their answers after {recipe.further_draws} other prompts (algorithm.further_draws): allow "
        "more, or take problems that the policy solves now and then",
    ),
    HealthCheck(
        "samples",
        lambda _, recipe, __: (
            recipe.algorithm.name == "ppo" and recipe.critic.warmup_steps >= recipe.steps
        ),
        "the critic alone learns in all {recipe.steps} steps (critic.warmup_steps: "
        "{recipe.critic.warmup_steps}): the policy stays as it is",
    ),
    HealthCheck(
        "length/truncated_share",
        lambda share, _, __: share >= 0.25,
        "{value:.0%} of the answers are cut off {cut}",
    ),
    HealthCheck(
        "reward/failed_share",
        lambda share, _, figures: share - figures.get("tools/failed_share", 0.0) >= 0.1,
        "{value:.0%} of the answers have no reward, because the function failed: samples.jsonl has "
        "some of them with the reason",
    ),
    HealthCheck(
        "train/engine_gap",
        lambda gap, _, __: gap >= 0.05,
        "log-probabilities of generation and training are {value:.2g} apart in the mean: {closer}",
    ),
    HealthCheck(
        "train/engine_gap_max",
        lambda gap, _, __: gap >= 5,
        "generation gives one token a log-probability that is {value:.2g} from training's: whether "
        "it draws from fewer tokens (generation.top_p, top_k) or computes otherwise, shows with "
        "generation.engine: native and generation.dtype as model.dtype",
    ),
    HealthCheck(
        "train/engine_kl",
        lambda kl, _, __: kl >= 0.1,
        "the policy that draws is not the one that learns (KL {value:.2g} a token): {closer}",
    ),
    HealthCheck(
        "train/gap_masked",
        lambda share, _, __: share >= 0.9,
        "{value:.0%} of the tokens trained on weigh nothing (algorithm.gap_rule: mask), so hardly "
        "anything is learned: {looser}",
    ),
    HealthCheck(
        "train/ratio_outliers",
        lambda share, _, __: share >= 0.1,
        "{value:.0%} of the tokens have become more than twice or less than half as likely since "
        "they were drawn: lower optimizer.learning_rate, or take fewer minibatches or epochs",
    ),
    HealthCheck(
        "train/behaviour_entropy",
        lambda entropy, recipe, figures: (
            entropy <= 0.02 and recipe.generation.temperature >= 0.5 and not _all_right(figures)
        ),
        "the policy hardly varies its answers any more ({value:.2g} nats a token) and most of them "
        "are wrong: raise algorithm.clip_high or algorithm.entropy_coefficient, or go back to an "
        "earlier checkpoint with a lower optimizer.learning_rate",
    ),
    HealthCheck(
        "train/grad_norm",
        lambda norm, recipe, _: norm >= 1000 * (recipe.optimizer.max_grad_norm or 1.0),
        "the gradient's norm is {value:.3g}: look at the rewards and the longest answers of this "
        "step, and lower optimizer.learning_rate",
    ),
    HealthCheck(
        "critic/explained_variance",
        lambda share, _, __: share <= -1.0,
        "the critic misleads (explained variance {value:.2f}): give it critic.warmup_steps, or a "
        "lower critic.learning_rate",
    ),
)


CUT = (
    "at generation.max_new_tokens = {recipe.generation.max_new_tokens}: raise it, or penalise "
    "length with algorithm.overlong_buffer"
)
"""Where answers of one turn are cut off."""


def _closer(recipe: ReasoningRecipe) -> str:
    """What brings the policy that draws closer to the one that learns."""
    section = recipe.generation
    narrow = [f"generation.{key}" for key, off in SAMPLERS.items() if getattr(section, key) != off]
    same = f"draw without {', '.join(narrow)}" if narrow else "compute both in one dtype"
    if recipe.training.recompute_logprobs:
        return f"{same}, or have algorithm.gap_cap bound the weight of such tokens further"
    return f"{same}, or weigh the difference with training.recompute_logprobs and algorithm.gap_cap"


def _looser(recipe: ReasoningRecipe) -> str:
    """What lets fewer tokens be masked for the gap between generation and training."""
    by_token = ", or set algorithm.gap_level: token" * (recipe.algorithm.gap_level == "sequence")
    cap = f"raise algorithm.gap_cap = {recipe.algorithm.gap_cap:g}"
    return f"{cap}{by_token}, or algorithm.gap_rule: truncate"


def hints(figures: Figures, recipe: ReasoningRecipe, cut: str = CUT) -> dict[HealthCheck, str]:
    """The checks that a step's figures do not pass, each in words.

    Args:
        figures: of the step.
        recipe: of the run.
        cut: where answers are cut off, and what helps; `{recipe}` is the recipe.
    """
    words = {
        "recipe": recipe,
        "cut": cut.format(recipe=recipe),
        "closer": _closer(recipe),
        "looser": _looser(recipe),
    }
    return {
        check: check.hint.format(value=figures[check.figure], **words)
        for check in CHECKS
        if check.figure in figures and check.wrong(figures[check.figure], recipe, figures)
    }
