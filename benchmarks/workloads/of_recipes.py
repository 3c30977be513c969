"""Four workloads that are recipes: what the planner was never tried on while it was built.

  * `wider`: the quick start with a model of six times the parameters, whose price per token is
    another one in every stage.
  * `with_reference`: recomputed log-probabilities and a KL term to the model of the beginning: two
    more passes over each answer, one of them on the state that is trained.
  * `one_step_ahead`: the quick start with a staleness of 1: generation runs beside training.
  * `ppo_one_minibatch`: PPO whose trainings begin only when all values are there.

Learning rates are so small that the steps of a comparison are alike. Models are warmed up for a
short while: what they answer does not matter, how long their answers are does not change.
"""

from __future__ import annotations

from harness import ROOT
from starting_point import quickstart

from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from workloads.common import LEARNING_RATE, Workload

STILL = f"optimizer.learning_rate={LEARNING_RATE}"


def _of_recipe(name: str, *overrides: str, recipe_name: str = "quickstart") -> Workload:
    """A workload of a recipe; its starting model is the quick start's with the same model keys."""
    model = [text for text in overrides if text.startswith(("model.", "warmup."))]
    _, _, source = quickstart(*model)
    recipe = read_recipe(ROOT / "recipes" / f"{recipe_name}.yaml", [STILL, *overrides])
    experiment = ReasoningExperiment(recipe)
    return Workload(
        name,
        lambda: recipe_flow(recipe, source, experiment.task),
        lambda step: experiment.batch(step, source),
        recipe.prompts_per_step,
        max_staleness=recipe.max_staleness,
    )


def wider() -> Workload:
    """The quick start with a hidden size of 320 instead of 128."""
    return _of_recipe(
        "wider", "model.hidden_size=320", "model.intermediate_size=960", "warmup.steps=60"
    )


def with_reference() -> Workload:
    """The quick start with recomputed log-probabilities and a KL term."""
    return _of_recipe(
        "with_reference", "training.recompute_logprobs=true", "algorithm.kl_coefficient=0.01"
    )


def one_step_ahead() -> Workload:
    """The quick start with a staleness of 1."""
    return _of_recipe("one_step_ahead", "max_staleness=1")


def ppo_one_minibatch() -> Workload:
    """The recipe `ppo_quickstart` with one mini-batch."""
    return _of_recipe(
        "ppo_one_minibatch",
        f"critic.learning_rate={LEARNING_RATE}",
        "minibatches=1",
        recipe_name="ppo_quickstart",
    )
