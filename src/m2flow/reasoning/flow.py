"""The macro flows of reasoning: what happens in a step, and nothing about where or when."""

from __future__ import annotations

from pathlib import Path

from m2flow.flow import Flow, Stream
from m2flow.reasoning.config import ReasoningRecipe
from m2flow.reasoning.tasks import Task
from m2flow.reasoning.workers import (
    Generator,
    Learner,
    ModelSource,
    Reference,
    Verifier,
    group_advantage,
    outcome,
)


class GRPO(Flow):
    """Sample a group of answers per prompt, score them, move the policy towards the better ones."""

    generator: Generator
    verifier: Verifier
    learner: Learner
    reference: Reference | None = None
    normalize_std: bool = True
    recompute_logprobs: bool = False

    def step(self, prompts: Stream) -> Stream:
        samples = self.generator.generate(prompts)
        samples = self.verifier.score(samples)
        samples = group_advantage(
            samples,
            group_size=self.generator.samples_per_prompt,
            normalize_std=self.normalize_std,
        )
        if self.recompute_logprobs:
            samples = self.learner.logprobs(samples)
        if self.reference is not None:
            samples = self.reference.logprobs(samples)
        return self.learner.train(samples)

    def sync(self) -> None:
        self.learner.publish(self.generator)

    def evaluate(self, prompts: Stream) -> Stream:
        """Greedy answers to held-out problems, scored."""
        samples = self.generator.generate(prompts, samples_per_prompt=1, temperature=0.0)
        return outcome(self.verifier.score(samples))


def grpo_flow(
    recipe: ReasoningRecipe,
    model: ModelSource,
    task: Task | None,
    checkpoint: Path | None = None,
) -> GRPO:
    """The flow of a recipe with its workers, none of them loaded.

    Args:
        recipe: every setting.
        model: the starting point (also the reference of a KL term).
        task: the rule that scores answers; None if the flow is only to be traced.
        checkpoint: go on from here: its model, and its trainer state.
    """
    policy = model
    if checkpoint is not None:
        policy = ModelSource(str(checkpoint / "model"), recipe.model.dtype)
    needs_reference = recipe.algorithm.kl_coefficient > 0
    return GRPO(
        generator=Generator(
            policy,
            samples_per_prompt=recipe.samples_per_prompt,
            max_new_tokens=recipe.generation.max_new_tokens,
            temperature=recipe.generation.temperature,
            max_running=recipe.generation.max_running,
        ),
        verifier=Verifier(model, task),
        learner=Learner(policy, recipe, None if checkpoint is None else str(checkpoint)),
        reference=Reference(model, recipe) if needs_reference else None,
        normalize_std=recipe.algorithm.normalize_std,
        recompute_logprobs=recipe.training.recompute_logprobs,
    )
