"""The macro flows of embodied agents: what happens in a step, and nothing about where or when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from m2flow.environments.spec import EnvironmentSpec
from m2flow.flow import Flow, Stream, loop
from m2flow.workloads.embodied.config import STATES, TINY, EmbodiedRecipe
from m2flow.workloads.embodied.workers import (
    Actor,
    EmbodiedLearner,
    PolicySource,
    Simulator,
    begin_alike,
    begin_others,
    critic_advantage,
    first_drawn,
    group_advantage,
    outcome,
    put_in,
)


class EmbodiedFlow(Flow):
    """What the algorithms have in common: a policy and environments that take turns."""

    simulator: Simulator
    actor: Actor
    learner: EmbodiedLearner
    group_size: int = 1

    def rolled_out(self, starts: Stream, group_size: int) -> Stream:
        """Whole rollouts of each start, with all of their turns."""
        return self.rolled_on(begin_alike(starts, group_size=group_size))

    def rolled_on(self, begun: Stream) -> Stream:
        """A whole rollout of each."""
        return loop(self.actor.act, self.simulator.step)(self.simulator.begin(begun))

    def sync(self) -> None:
        self.learner.publish(self.actor)

    def evaluate(self, starts: Stream) -> Stream:
        """Episodes with seeds of their own; what is drawn is said by the starts."""
        return outcome(self.rolled_out(starts, 1))


class EmbodiedPPO(EmbodiedFlow):
    """Compare each turn with what the policy's value head expected."""

    gamma: float = 0.99
    lam: float = 0.95
    advantage_level: str = "chunk"

    def step(self, starts: Stream) -> Stream:
        rollouts = self.actor.look_beyond(self.rolled_out(starts, 1))
        level = self.advantage_level
        compared = critic_advantage(rollouts, gamma=self.gamma, lam=self.lam, level=level)
        return self.learner.train(compared)


class EmbodiedGRPO(EmbodiedFlow):
    """Compare the episodes of a group, which begin alike, with each other.

    Where a group teaches nothing another start is tried in its place, up to `further_draws` times.
    """

    normalize_std: bool = True
    reward: str = "success"
    success_bounds: tuple[float, float] | None = None
    further_draws: int = 0

    def step(self, starts: Stream) -> Stream:
        judging: dict[str, Any] = {
            "group_size": self.group_size,
            "reward": self.reward,
            "success_bounds": self.success_bounds,
        }
        begun = begin_alike(starts, group_size=self.group_size)
        rollouts = self.rolled_on(begun)
        if self.further_draws:
            rollouts = first_drawn(rollouts)
        for draw in range(self.further_draws):
            others = begin_others(rollouts, begun, draw=draw, **judging)
            rollouts = put_in(rollouts, others, self.rolled_on(others))
        rollouts = group_advantage(rollouts, normalize_std=self.normalize_std, **judging)
        return self.learner.train(rollouts)


class EmbodiedSAC(EmbodiedFlow):
    """Learn from a buffer of what was done, by this policy and those before it."""

    def step(self, starts: Stream) -> Stream:
        return self.learner.train(self.rolled_out(starts, 1))


def recipe_flow(
    recipe: EmbodiedRecipe,
    spec: EnvironmentSpec | None = None,
    start: Path | None = None,
    checkpoint: Path | None = None,
) -> EmbodiedPPO | EmbodiedGRPO | EmbodiedSAC:
    """The flow of a recipe with its workers, none of them loaded.

    Args:
        recipe: every setting.
        spec: of the environment; None if the flow is only to be traced.
        start: folder of the weights that training starts from; None for those that are drawn.
        checkpoint: go on from here, its weights and the state of its trainer.
    """
    algorithm, folder = recipe.algorithm, checkpoint or start
    path = None if folder is None else str(folder)
    model = recipe.model
    if model not in (None, TINY, STATES):  # lanes may work in another folder
        model = str(Path(model).expanduser().absolute())
    source = PolicySource(recipe.policy, spec, recipe.seed, path, algorithm.has_critic, model)
    state = None if checkpoint is None else str(checkpoint)
    workers: dict[str, Any] = {
        "simulator": Simulator(
            recipe.environment,
            recipe.rollout.horizon,
            recipe.rollouts_per_step,
            steps_aside=spec is not None
            and (spec.restores == "saved" or recipe.environment.steps_aside),
            longest=spec.max_episode_steps if spec and recipe.rollout.automatic_reset else None,
        ),
        "actor": Actor(source, recipe.update.turns_per_microbatch),
        "learner": EmbodiedLearner(source, recipe, state),
        "group_size": recipe.group_size,
    }
    if algorithm.name == "ppo":
        return EmbodiedPPO(
            **workers,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            advantage_level=algorithm.advantage_level,
        )
    if algorithm.name == "sac":
        return EmbodiedSAC(**workers)
    return EmbodiedGRPO(
        **workers,
        normalize_std=algorithm.normalize_std,
        reward=algorithm.reward,
        success_bounds=algorithm.success_bounds,
        further_draws=algorithm.further_draws,
    )
