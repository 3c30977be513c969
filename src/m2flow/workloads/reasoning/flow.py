"""The macro flows of reasoning: what happens in a step, and nothing about where or when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2flow.flow import Flow, Stream
from m2flow.rewards.reward import WeightedReward
from m2flow.workloads.reasoning.algorithm_section import OF_GROUPS
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.supported import known_shape
from m2flow.workloads.reasoning.workers import (
    AdaptedSource,
    Critic,
    Generator,
    JudgeModel,
    Learner,
    ModelSource,
    Reference,
    RewardModel,
    Verifier,
    gae,
    group_advantage,
    outcome,
    reward_to_go,
    shape_reward,
    whiten,
)


class PolicyGradient(Flow):
    """What GRPO and PPO have in common: who takes part, and how answers are judged."""

    generator: Generator
    verifier: Verifier
    learner: Learner
    reference: Reference | None = None
    reward_model: RewardModel | None = None
    judge: JudgeModel | None = None
    verifies: bool = True
    recompute_logprobs: bool = False
    kl_in_reward: float = 0.0
    overlong_buffer: int = 0
    scale: str = "group"
    drop_truncated: bool = False

    def judged(self, samples: Stream) -> Stream:
        """Rewards with what the models say that judge too, if there are any."""
        if self.reward_model is not None:
            samples = self.reward_model.score(samples)
        return samples if self.judge is None else self.judge.score(samples)

    def shaped(self, samples: Stream, kl: float = 0.0) -> Stream:
        """All that an answer has earned, less what its length and (by `kl`) its drift cost.

        Drift is that from the reference.
        """
        samples = self.judged(samples)
        if self.kl_in_reward and self.reference is not None:
            samples = self.reference.logprobs(samples)
        if not (self.overlong_buffer or kl):
            return samples
        max_tokens = self.generator.max_new_tokens
        return shape_reward(samples, max_tokens=max_tokens, buffer=self.overlong_buffer, kl=kl)

    def prepared(self, samples: Stream) -> Stream:
        """Advantages in the scale of the step; what the loss needs of the policy and reference."""
        if self.scale == "step":
            samples = whiten(samples, drop_truncated=self.drop_truncated)
        if self.recompute_logprobs:
            samples = self.learner.logprobs(samples)
        if self.reference is not None and not self.kl_in_reward:
            samples = self.reference.logprobs(samples)
        return samples

    def sync(self) -> None:
        self.learner.publish(self.generator)

    def evaluate(self, prompts: Stream) -> Stream:
        """Greedy answers to held-out problems, scored: by functions alone, where there are any."""
        samples = self.generator.generate(prompts, samples_per_prompt=1, temperature=0.0)
        samples = self.verifier.score(samples)
        return outcome(samples if self.verifies else self.judged(samples))


class GRPO(PolicyGradient):
    """Sample a group of answers per prompt, score them, move the policy towards the better ones."""

    leave_one_out: bool = False
    drop_equal: bool = False
    further_draws: int = 0

    def step(self, prompts: Stream) -> Stream:
        samples = self.generator.generate(prompts)
        samples = self.verifier.score(samples)
        # Of other prompts, where all answers to one are worth the same.
        for draw in range(self.further_draws):
            samples = self.generator.draw_again(samples, draw=draw)
            samples = self.verifier.score_again(samples)
        samples = group_advantage(
            self.shaped(samples, self.kl_in_reward),
            group_size=self.generator.samples_per_prompt,
            leave_one_out=self.leave_one_out,
            normalize_std=self.scale == "group",
            drop_equal=self.drop_equal,
            carries_over=self.generator.tokens_per_step is not None,
        )
        return self.learner.train(self.prepared(samples))


class Reinforce(PolicyGradient):
    """Compare the rewards that follow each token with those of all tokens of the step."""

    gamma: float = 1.0

    def step(self, prompts: Stream) -> Stream:
        samples = self.generator.generate(prompts)
        samples = self.shaped(self.verifier.score(samples))
        samples = reward_to_go(samples, gamma=self.gamma, kl=self.kl_in_reward)
        return self.learner.train(self.prepared(samples))


class PPO(PolicyGradient):
    """Compare each token with what a critic expected; policy and critic learn side by side."""

    critic: Critic
    gamma: float = 1.0
    lam: float = 0.95

    def step(self, prompts: Stream) -> Stream:
        samples = self.generator.generate(prompts)
        scored, valued = self.verifier.score(samples), self.critic.values(samples)
        samples = gae(
            self.shaped(scored), valued, gamma=self.gamma, lam=self.lam, kl=self.kl_in_reward
        )
        self.critic.train(samples)
        return self.learner.train(self.prepared(samples))


def recipe_flow(
    recipe: ReasoningRecipe,
    model: ModelSource,
    rewards: Sequence[WeightedReward] = (),
    checkpoint: Path | None = None,
) -> GRPO | Reinforce | PPO:
    """The flow of a recipe with its workers, none of them loaded.

    Args:
        recipe: every setting.
        model: the starting point (also the reference of a KL term, and what a critic is made of).
        rewards: what scores answers; none if the flow is only to be traced.
        checkpoint: go on from here: its models, and the state of their trainers.
    """
    algorithm, policy = recipe.algorithm, saved(recipe, model, checkpoint)
    shape = known_shape(recipe)
    state = None if checkpoint is None else str(checkpoint)
    workers: dict[str, Any] = {
        "generator": Generator(
            policy,
            samples_per_prompt=recipe.samples_per_prompt,
            max_new_tokens=recipe.generation.max_new_tokens,
            temperature=recipe.generation.temperature,
            top_k=recipe.generation.top_k,
            top_p=recipe.generation.top_p,
            min_p=recipe.generation.min_p,
            max_running=recipe.generation.max_running,
            engine=recipe.generation.engine,
            dtype=recipe.generation.dtype,
            cache_gb=recipe.generation.cache_gb,
            captured_decode=recipe.generation.captured_decode,
            key_value_heads=None if shape is None else shape.kv_heads,
            stop=recipe.generation.stop,
            chat_options=recipe.data.template_variables,
            tokens_per_step=recipe.generation.tokens_per_step,
            adapted=AdaptedSource.of(recipe, model),
        ),
        "verifier": Verifier(model, rewards),
        # Adapters stand on the model that the run has started from, and come from the state.
        "learner": Learner(model if recipe.model.lora_rank else policy, recipe, state),
        "reference": Reference(model, recipe) if algorithm.kl_coefficient > 0 else None,
        "reward_model": reward_model_of(recipe),
        "judge": judge_of(recipe),
        "verifies": recipe.verifies,
        "recompute_logprobs": recipe.training.recompute_logprobs,
        "kl_in_reward": algorithm.kl_in_reward,
        "overlong_buffer": algorithm.overlong_buffer,
        "scale": algorithm.scale,
        "drop_truncated": algorithm.truncated == "drop",
    }
    if algorithm.name in OF_GROUPS:
        return GRPO(
            **workers,
            leave_one_out=algorithm.name == "rloo",
            drop_equal=algorithm.equal_groups == "drop",
            further_draws=recipe.further_draws,
        )
    if not algorithm.has_critic:
        return Reinforce(**workers, gamma=algorithm.gamma)
    critic = Critic(saved(recipe, model, checkpoint, Critic.part), recipe, state)
    return PPO(
        **workers,
        critic=critic,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
    )


def reward_model_of(recipe: ReasoningRecipe) -> RewardModel | None:
    """The classifier that judges answers, if the recipe names one."""
    return None if recipe.reward_model.path is None else RewardModel(recipe.reward_model)


def judge_of(recipe: ReasoningRecipe) -> JudgeModel | None:
    """The model that judges answers in words, if the recipe names one."""
    return None if recipe.judge.path is None else JudgeModel(recipe.judge)


def saved(
    recipe: ReasoningRecipe, model: ModelSource, checkpoint: Path | None, part: str = ""
) -> ModelSource:
    """The weights to go on from, or to start with."""
    if checkpoint is None:
        return model
    return ModelSource(str(checkpoint / part / "model"), recipe.model.dtype)
