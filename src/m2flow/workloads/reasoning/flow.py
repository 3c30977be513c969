"""The macro flows of reasoning: what happens in a step, and nothing about where or when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2flow.flow import Flow, Stream
from m2flow.rewards.reward import WeightedReward
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.supported import heads_of
from m2flow.workloads.reasoning.workers import (
    Critic,
    Generator,
    Learner,
    ModelSource,
    Reference,
    Verifier,
    gae,
    group_advantage,
    outcome,
    whiten,
)


class PolicyGradient(Flow):
    """What GRPO and PPO have in common: who takes part, and how answers are judged."""

    generator: Generator
    verifier: Verifier
    learner: Learner
    reference: Reference | None = None
    recompute_logprobs: bool = False

    def with_logprobs(self, samples: Stream) -> Stream:
        """What the loss needs of the trainer's own policy, and of the reference."""
        if self.recompute_logprobs:
            samples = self.learner.logprobs(samples)
        if self.reference is not None:
            samples = self.reference.logprobs(samples)
        return samples

    def sync(self) -> None:
        self.learner.publish(self.generator)

    def evaluate(self, prompts: Stream) -> Stream:
        """Greedy answers to held-out problems, scored."""
        samples = self.generator.generate(prompts, samples_per_prompt=1, temperature=0.0)
        return outcome(self.verifier.score(samples))


class GRPO(PolicyGradient):
    """Sample a group of answers per prompt, score them, move the policy towards the better ones."""

    normalize_std: bool = True

    def step(self, prompts: Stream) -> Stream:
        samples = self.generator.generate(prompts)
        samples = self.verifier.score(samples)
        samples = group_advantage(
            samples,
            group_size=self.generator.samples_per_prompt,
            normalize_std=self.normalize_std,
        )
        return self.learner.train(self.with_logprobs(samples))


class PPO(PolicyGradient):
    """Compare each token with what a critic expected; policy and critic learn side by side."""

    critic: Critic
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True

    def step(self, prompts: Stream) -> Stream:
        samples = self.generator.generate(prompts)
        scored, valued = self.verifier.score(samples), self.critic.values(samples)
        samples = gae(scored, valued, gamma=self.gamma, lam=self.lam)
        self.critic.train(samples)
        if self.whiten:
            samples = whiten(samples)
        return self.learner.train(self.with_logprobs(samples))


def recipe_flow(
    recipe: ReasoningRecipe,
    model: ModelSource,
    rewards: Sequence[WeightedReward] = (),
    checkpoint: Path | None = None,
) -> GRPO | PPO:
    """The flow of a recipe with its workers, none of them loaded.

    Args:
        recipe: every setting.
        model: the starting point (also the reference of a KL term, and what a critic is made of).
        rewards: what scores answers; none if the flow is only to be traced.
        checkpoint: go on from here: its models, and the state of their trainers.
    """
    algorithm, policy = recipe.algorithm, _saved(recipe, model, checkpoint)
    state = None if checkpoint is None else str(checkpoint)
    workers: dict[str, Any] = {
        "generator": Generator(
            policy,
            samples_per_prompt=recipe.samples_per_prompt,
            max_new_tokens=recipe.generation.max_new_tokens,
            temperature=recipe.generation.temperature,
            max_running=recipe.generation.max_running,
            key_value_heads=heads_of(recipe),
        ),
        "verifier": Verifier(model, rewards),
        "learner": Learner(policy, recipe, state),
        "reference": Reference(model, recipe) if algorithm.kl_coefficient > 0 else None,
        "recompute_logprobs": recipe.training.recompute_logprobs,
    }
    if algorithm.name == "grpo":
        return GRPO(**workers, normalize_std=algorithm.normalize_std)
    critic = Critic(_saved(recipe, model, checkpoint, Critic.part), recipe, state)
    return PPO(
        **workers,
        critic=critic,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        whiten=algorithm.whiten,
    )


def _saved(
    recipe: ReasoningRecipe, model: ModelSource, checkpoint: Path | None, part: str = ""
) -> ModelSource:
    """The weights to go on from, or to start with."""
    if checkpoint is None:
        return model
    return ModelSource(str(checkpoint / part / "model"), recipe.model.dtype)
