"""Closed forms of the execution modes over analytic phase times, for the rows of published tables.

*Temporal*: the phases one after another on all lanes, with switching. *Spatial*: disjoint lanes, a
pipeline of single answers with its fill and its tail. For loops with a simulator: temporal, spatial
(training has lanes of its own) and hybrid (simulator and policy side by side in two groups of
environments that take turns, training on all lanes).

These are the modes as their authors run them, whose generators span several lanes and whose states
wait in memory that is not pinned; what a phase takes is the product's own roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from m2flow.plan.analytic_training import ADAM_BYTES
from m2flow.plan.analytic_work import Answers
from m2flow.plan.embodied_models import ActionModel, Simulator
from m2flow.plan.footprint import training_footprint
from m2flow.plan.generating import Finished, Generation, by_whole_groups, generate, requests
from m2flow.plan.hardware import PAGEABLE_FRACTION, Device
from m2flow.plan.models import WEIGHT_BYTES, ModelShape
from m2flow.plan.roofline import (
    Layout,
    Rates,
    action_seconds,
    action_training_seconds,
    decode_step_seconds,
    log_probability_seconds,
    prefill_seconds,
    publish_seconds,
    training_seconds,
)

PLAYED_REPLICAS = 32
"""Generating replicas that are played; more of them are alike."""


@dataclass(frozen=True)
class Slower:
    """How many times as long another system takes for a phase."""

    rollout: float = 1.0
    forward: float = 1.0
    training: float = 1.0


@dataclass(frozen=True)
class Reasoning:
    """A step of GRPO or PPO on a language model.

    Attributes:
        number: of answers.
        group: answers to a prompt.
        max_running: requests that a generating replica decodes at once.
        sharing: the same on lanes that trainers share.
        passes: forward passes over the answers (log-probabilities; values of a critic).
        trained: models trained.
    """

    model: ModelShape
    device: Device
    number: int
    group: int
    answers: Answers
    rollout: Layout
    train: Layout
    max_running: int
    sharing: int
    updates: int = 4
    passes: int = 1
    trained: int = 1

    @property
    def tokens(self) -> float:
        return self.number * self.answers.tokens

    @cache  # noqa: B019 - a handful of workloads, alive as long as the module
    def generation(self, lanes: int, rates: Rates, limit: int) -> Generation:
        """Of a sample of the replicas, each with its share of the answers."""
        replicas = lanes // self.rollout.lanes
        played = min(replicas, PLAYED_REPLICAS)
        groups = round(self.number / self.group * played / replicas)
        prompt = self.answers.prompt_tokens
        own = self.number / self.group * prompt / replicas
        start = prefill_seconds(self.model, own, prompt / 2, self.device, self.rollout, rates)
        wanted = requests(self.answers.lengths.sample(groups * self.group), prompt, self.group)

        def step(running: float, kv_tokens: float) -> float:
            return decode_step_seconds(
                self.model, running, kv_tokens, self.device, self.rollout, rates
            )

        return generate(wanted, played, step, limit, start=start)

    def forward(self, lanes: int, rates: Rates) -> float:
        """One forward pass over all answers."""
        return log_probability_seconds(
            self.model, self.tokens, self.answers.context, lanes, self.device, self.train, rates,
            self.number, self.answers.deviation,
        )  # fmt: skip

    def training(self, lanes: int, rates: Rates) -> float:
        """One model's training on all answers."""
        return training_seconds(
            self.model, self.tokens, self.answers.context, lanes, self.device, self.train, rates,
            self.number, self.answers.deviation, self.updates,
        )  # fmt: skip

    def fits(self, lanes: int) -> bool:
        """Whether so many lanes hold a trainer."""
        taken = training_footprint(self.model, lanes, self.train, self.answers.longest)
        return taken.total <= self.device.usable_bytes

    def switching(self, lanes: int) -> float:
        """A step's moves on all lanes: states brought and taken away for each phase, publishing.

        The generator comes and goes, as do weights for each pass, and a trainer for its training.
        """
        weights = self.model.weight_bytes / self.train.lanes
        trainer = training_footprint(self.model, lanes, self.train, self.answers.longest).state
        moved = self.model.weight_bytes / self.rollout.lanes
        moved += self.passes * weights + self.trained * trainer
        copying = 2 * moved / (self.device.host_bytes_per_second * PAGEABLE_FRACTION)
        return copying + publish_seconds(
            self.model.weight_bytes, self.device, self.device, self.rollout, same_lanes=True
        )


def temporal(work: Reasoning, lanes: int, rates: Rates, slower: Slower | None = None) -> float:
    """Seconds of a step whose phases take turns on all lanes."""
    slower = slower or Slower()
    return (
        slower.rollout * work.generation(lanes, rates, work.sharing).seconds
        + slower.forward * work.passes * work.forward(lanes, rates)
        + slower.training * work.trained * work.training(lanes, rates)
        + work.switching(lanes)
    )


def splits(work: Reasoning, lanes: int) -> list[tuple[int, int, int]]:
    """Lanes for generation, for each forward pass and for each training."""
    unit = work.train.lanes
    coarse = max(unit, lanes // 16)
    found = []
    for forward in {unit, *range(coarse, lanes, coarse)}:
        for training in {unit, *range(coarse, lanes, coarse)}:
            generating = lanes - work.passes * forward - work.trained * training
            enough = generating > 0 and generating % work.rollout.lanes == 0
            if enough and work.fits(training):
                found.append((generating, forward, training))
    return sorted(found)


def consume(arrivals: Sequence[Finished], seconds_per_token: float) -> list[Finished]:
    """When a stage that takes answers as they come, one by one, has done each of them."""
    free, done = 0.0, []
    for answer in arrivals:
        free = max(free, answer.seconds) + answer.tokens * seconds_per_token
        done.append(Finished(free, answer.tokens, answer.group))
    return done


def spatial(work: Reasoning, split: tuple[int, int, int], rates: Rates) -> float:
    """Seconds of a step on disjoint lanes: answers stream from stage to stage as they finish."""
    generating, forwarding, training = split
    answers = work.generation(generating, rates, work.max_running)
    scored = consume(answers.finished, work.forward(forwarding, rates) / answers.tokens)
    complete = by_whole_groups(scored)
    trained = consume(complete, work.training(training, rates) / answers.tokens)
    publish = publish_seconds(
        work.model.weight_bytes, work.device, work.device, work.rollout, same_lanes=False
    )
    return trained[-1].seconds + publish


def best_spatial(work: Reasoning, lanes: int, rates: Rates) -> tuple[float, tuple[int, int, int]]:
    """The fastest split, and its seconds."""
    return min((spatial(work, split, rates), split) for split in splits(work, lanes))


# Loops of a simulator and a policy ----------------------------------------------------------------


@dataclass(frozen=True)
class Embodied:
    """A step of PPO or GRPO on a vision-language-action model.

    Attributes:
        envs: environments in all.
        steps: of each, as the table counts them: one chunk of actions each.
    """

    policy: ActionModel
    simulator: Simulator
    device: Device
    envs: int
    steps: int
    updates: int

    def training(self, lanes: int, rates: Rates) -> float:
        """On all decisions of the step."""
        return action_training_seconds(
            self.policy, self.envs * self.steps, lanes, self.device, rates, self.updates
        )

    def turns(self, simulating: int, acting: int, rates: Rates) -> float:
        """All steps of two groups of environments that take turns on disjoint lanes."""
        group = self.envs // 2
        world = self.simulator.seconds(-(-group // simulating))
        policy = action_seconds(self.policy, -(-group // acting), self.device, rates)
        return self.steps * max(world + policy, 2 * world, 2 * policy) + min(world, policy)

    def switching(self, lanes: int) -> float:
        """The policy that acts makes room for its trainer, and comes back with new weights."""
        moved = self.policy.parameters * (WEIGHT_BYTES + ADAM_BYTES / lanes)
        return 2 * moved / (self.device.host_bytes_per_second * PAGEABLE_FRACTION)


def embodied_temporal(work: Embodied, lanes: int, rates: Rates, slower: Slower) -> float:
    """Simulator and policy take turns on all lanes; then training."""
    world = work.simulator.seconds(work.envs / lanes)
    policy = action_seconds(work.policy, work.envs / lanes, work.device, rates)
    looping = work.steps * (world + slower.rollout * policy)
    return looping + slower.training * work.training(lanes, rates) + work.switching(lanes)


def embodied_hybrid(work: Embodied, lanes: int, rates: Rates) -> tuple[float, str]:
    """The best split of simulator and policy side by side; training on all lanes."""
    found = [
        (work.turns(n, lanes - n, rates) + work.training(lanes, rates) + work.switching(lanes),
         f"{n} simulate, {lanes - n} act")
        for n in range(1, lanes)
    ]  # fmt: skip
    return min(found)


def embodied_spatial(work: Embodied, lanes: int, rates: Rates) -> tuple[float, str]:
    """The best split where training has lanes of its own, idle while episodes run."""
    found = [
        (work.turns(n, m, rates) + work.training(lanes - n - m, rates),
         f"{n} simulate, {m} act, {lanes - n - m} train")
        for n in range(1, lanes - 1)
        for m in range(1, lanes - n)
    ]  # fmt: skip
    return min(found)
