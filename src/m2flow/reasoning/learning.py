"""A recipe's learning sections in the trainer's terms."""

from __future__ import annotations

from m2flow.algorithms.grpo import GRPO
from m2flow.reasoning.config import ReasoningRecipe
from m2flow.training.optimizer import AdamWConfig
from m2flow.training.policy import PolicyTrainerConfig
from m2flow.training.schedule import Schedule


def loss_of(recipe: ReasoningRecipe) -> GRPO:
    """The loss that `algorithm` describes."""
    return GRPO(**recipe.algorithm.model_dump(exclude={"name"}))


def trainer_config(recipe: ReasoningRecipe) -> PolicyTrainerConfig:
    """Optimizer, schedule over all optimizer steps of the run, and packing."""
    optimizer = recipe.optimizer
    return PolicyTrainerConfig(
        optimizer=AdamWConfig(
            learning_rate=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            schedule=Schedule(
                optimizer.schedule, optimizer.warmup_steps, recipe.steps * recipe.minibatches
            ),
            max_grad_norm=optimizer.max_grad_norm,
        ),
        tokens_per_microbatch=recipe.training.tokens_per_microbatch,
        sharing=recipe.training.sharing,
        temperature=recipe.generation.temperature,
        drop_zero_advantage=recipe.training.drop_zero_advantage,
    )
