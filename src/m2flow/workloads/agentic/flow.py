"""The macro flow of an agent: what happens in a step, and nothing about where or when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2flow.errors import UserError
from m2flow.flow import Stream, loop
from m2flow.rewards.reward import WeightedReward
from m2flow.workloads.agentic.config import AgenticRecipe, EpisodeSection
from m2flow.workloads.agentic.episodes import begin_episodes
from m2flow.workloads.agentic.workers import (
    AgentHost,
    Caller,
    ToolUser,
    TrajectoryVerifier,
    TurnGenerator,
    turn_advantage,
)
from m2flow.workloads.reasoning.flow import PolicyGradient, saved
from m2flow.workloads.reasoning.workers import (
    AdaptedSource,
    Learner,
    ModelSource,
    Reference,
    outcome,
)

DRAWING = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "max_running", "engine", "cache_gb",
    "captured_decode", "stop",
)  # fmt: skip
"""Keys of `generation` that the generator takes as they are."""


class Trajectories(PolicyGradient):
    """What the flows of agents have in common: trajectories of a group are compared."""

    generator: TurnGenerator
    verifier: TrajectoryVerifier
    leave_one_out: bool = False
    drop_equal: bool = False
    credit: str = "trajectory"

    def step(self, prompts: Stream) -> Stream:
        size = self.generator.samples_per_prompt
        samples = turn_advantage(
            self.verifier.score(self.rolled_out(prompts, size, greedy=False)),
            group_size=size,
            leave_one_out=self.leave_one_out,
            normalize_std=self.scale == "group",
            drop_equal=self.drop_equal,
            credit=self.credit,
        )
        return self.learner.train(self.prepared(samples))

    def rolled_out(self, prompts: Stream, count: int, *, greedy: bool) -> Stream:
        """Whole trajectories, so many of each prompt."""
        raise NotImplementedError

    def evaluate(self, prompts: Stream) -> Stream:
        """Greedy trajectories on held-out problems, scored."""
        return outcome(self.verifier.score(self.rolled_out(prompts, 1, greedy=True)))


class Agent(Trajectories):
    """Turns of a policy and answers of tools go around until an answer needs no tool."""

    tools: Caller

    def rolled_out(self, prompts: Stream, count: int, *, greedy: bool) -> Stream:
        episodes = begin_episodes(prompts, samples_per_prompt=count, greedy=greedy)
        around = loop(
            self.generator.turn, self.tools.call, max_turns=self.generator.episode.max_turns
        )
        return around(episodes)


class HostedAgent(Trajectories):
    """An agent of the user's makes the trajectories, and asks the policy over HTTP."""

    generator: AgentHost

    def rolled_out(self, prompts: Stream, count: int, *, greedy: bool) -> Stream:
        return self.generator.host(prompts, samples_per_prompt=count, greedy=greedy)


def episode_of(recipe: AgenticRecipe) -> EpisodeSection:
    """The recipe's section on episodes; where no chat template is used, `auto` is `tags`.

    Raises:
        UserError: calls are to be turns of a chat template, and none is used.
    """
    episode = recipe.episode
    if recipe.data.chat is not False:
        return episode
    if episode.dialect == "chat" or recipe.agent is not None:
        whose = "an agent's" if recipe.agent is not None else "the dialect's"
        raise UserError(
            f"{whose} calls and answers are turns of a chat template",
            key="data.chat",
            value=False,
            hint="take it out",
        )
    return episode.model_copy(update={"dialect": "tags"})


def recipe_flow(
    recipe: AgenticRecipe,
    model: ModelSource,
    rewards: Sequence[WeightedReward] = (),
    turn_rewards: Sequence[WeightedReward] = (),
    tools: Sequence[str] = (),
    checkpoint: Path | None = None,
) -> Agent | HostedAgent:
    """The flow of a recipe with its workers, none of them loaded.

    Args:
        recipe: every setting.
        model: the starting point.
        rewards, turn_rewards: what scores trajectories and turns.
        tools: names of the tools there are, as they say themselves.
        checkpoint: go on from here.
    """
    algorithm, policy = recipe.algorithm, saved(recipe, model, checkpoint)
    generation, episode = recipe.generation, episode_of(recipe)
    drawing = {
        "samples_per_prompt": recipe.samples_per_prompt,
        **{name: getattr(generation, name) for name in DRAWING},
        "dtype": generation.dtype or recipe.model.dtype,
        "chat_options": recipe.data.template_variables,
        "adapted": AdaptedSource.of(recipe, model),
    }
    settings: dict[str, Any] = {
        "verifier": TrajectoryVerifier(
            model, rewards, turn_rewards, episode, recipe.data.template_variables
        ),
        "learner": Learner(
            model if recipe.model.lora_rank else policy,
            recipe,
            None if checkpoint is None else str(checkpoint),
        ),
        "reference": Reference(model, recipe) if algorithm.kl_coefficient > 0 else None,
        "recompute_logprobs": recipe.training.recompute_logprobs,
        "scale": algorithm.scale,
        "drop_truncated": algorithm.truncated == "drop",
        "leave_one_out": algorithm.name == "rloo",
        "drop_equal": algorithm.equal_groups == "drop",
        "credit": episode.credit,
    }
    if recipe.agent is not None:
        host = AgentHost(policy, episode, recipe.agent, **drawing)
        return HostedAgent(generator=host, **settings)
    return Agent(
        generator=TurnGenerator(policy, episode, tools, **drawing),
        tools=ToolUser(model, episode, tools, recipe.tools, recipe.data.template_variables),
        **settings,
    )
