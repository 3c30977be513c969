"""A recipe's learning sections in the trainer's terms."""

from __future__ import annotations

from dataclasses import fields, replace

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.algorithms.ppo import CriticLoss
from m2flow.training.optimizer import AdamWConfig
from m2flow.training.policy import PolicyTrainerConfig
from m2flow.training.schedule import Schedule
from m2flow.workloads.reasoning.config import ReasoningRecipe


def loss_of(recipe: ReasoningRecipe) -> GRPOLoss:
    """The policy's loss that `algorithm` describes; PPO's is GRPO's, on other advantages."""
    algorithm = recipe.algorithm
    derived = {"kl_coefficient", "kl_estimator", "token_budget"}
    names = {field.name for field in fields(GRPOLoss)} - derived
    return GRPOLoss(
        **{name: getattr(algorithm, name) for name in names},
        kl_coefficient=algorithm.kl_in_loss,
        kl_estimator=algorithm.kl_estimator_in_loss,
        token_budget=recipe.longest_answer,
    )


def critic_loss_of(recipe: ReasoningRecipe) -> CriticLoss:
    """The critic's loss that `critic` describes."""
    aggregation = recipe.algorithm.aggregation
    return CriticLoss(recipe.critic.value_clip, aggregation, recipe.longest_answer)


def critic_config(recipe: ReasoningRecipe, device: str = "cpu") -> PolicyTrainerConfig:
    """The critic's optimizer and packing: the policy's, at a learning rate of its own."""
    config = trainer_config(recipe, device, idle_steps=0)
    optimizer = replace(config.optimizer, learning_rate=recipe.critic.learning_rate)
    return replace(config, optimizer=optimizer)


def trainer_config(
    recipe: ReasoningRecipe, device: str = "cpu", *, idle_steps: int | None = None
) -> PolicyTrainerConfig:
    """Optimizer, schedule over all optimizer steps of the run, and packing.

    Args:
        recipe: every setting.
        device: where it trains, for what the recipe leaves to the kind of device.
        idle_steps: optimizer steps at the start that move nothing; None for those in which a
            critic alone learns.
    """
    optimizer = recipe.optimizer
    return PolicyTrainerConfig(
        optimizer=AdamWConfig(
            learning_rate=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            schedule=Schedule(
                optimizer.schedule,
                optimizer.warmup_steps,
                recipe.optimizer_steps,
                idle_steps=recipe.idle_steps if idle_steps is None else idle_steps,
            ),
            max_grad_norm=optimizer.max_grad_norm,
            on_host=recipe.training.optimizer_on_host,
            moments_8bit=recipe.training.moments == "8bit",
            stochastic_rounding=recipe.training.rounding == "stochastic",
        ),
        tokens_per_microbatch=recipe.training.tokens_per_microbatch,
        sharing=recipe.training.sharing,
        temperature=recipe.generation.temperature,
        drop_zero_advantage=recipe.training.drop_zero_advantage,
        gradient_checkpointing=recipe.training.checkpoints_on(device),
    )
