"""A recipe's learning sections in the trainer's terms."""

from __future__ import annotations

from dataclasses import replace

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.algorithms.ppo import CriticLoss
from m2flow.training.optimizer import AdamWConfig
from m2flow.training.policy import PolicyTrainerConfig
from m2flow.training.schedule import Schedule
from m2flow.workloads.reasoning.config import KEYS_OF_ALGORITHMS, ReasoningRecipe


def loss_of(recipe: ReasoningRecipe) -> GRPOLoss:
    """The policy's loss that `algorithm` describes.

    PPO's is GRPO's; they differ in where advantages come from.
    """
    return GRPOLoss(**recipe.algorithm.model_dump(exclude={"name", *KEYS_OF_ALGORITHMS}))


def critic_loss_of(recipe: ReasoningRecipe) -> CriticLoss:
    """The critic's loss that `critic` describes."""
    return CriticLoss(recipe.critic.value_clip, recipe.algorithm.aggregation)


def critic_config(recipe: ReasoningRecipe) -> PolicyTrainerConfig:
    """The critic's optimizer and packing: the policy's, at a learning rate of its own."""
    config = trainer_config(recipe)
    optimizer = replace(config.optimizer, learning_rate=recipe.critic.learning_rate)
    return replace(config, optimizer=optimizer)


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
