"""Closed forms of the execution modes over analytic phase times, for the rows of published tables.

*Temporal*: the phases one after another on all lanes, with switching. *Spatial*: disjoint lanes, a
pipeline of single answers with its fill and its tail. *Time-varying*: all lanes generate until the
tail begins; then the unfinished answers move together onto few lanes, and the others compute
log-probabilities and train. For loops with a simulator: temporal, spatial (training has lanes of
its own) and hybrid (simulator and policy side by side in two groups of environments that take
turns, training on all lanes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from m2flow.plan.embodied_models import ActionModel, Simulator
from m2flow.plan.generating import Generation, by_whole_groups, consume, generate, requests
from m2flow.plan.hardware import Device
from m2flow.plan.lognormal import LogNormalLengths
from m2flow.plan.models import ModelShape
from m2flow.plan.roofline import (
    Layout,
    Rates,
    action_seconds,
    action_training_seconds,
    decode_step_seconds,
    host_copy_seconds,
    log_probability_seconds,
    prefill_seconds,
    publish_seconds,
    training_seconds,
)

ADAM_BYTES = 16
"""Of a trained parameter: two of weight and gradient each, twelve of single-precision state."""


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
        passes: forward passes over the answers (log-probabilities; values of a critic).
        trained: models trained.
        max_running: requests that a generating replica decodes at once.
    """

    model: ModelShape
    device: Device
    answers: int
    group: int
    prompt: int
    lengths: LogNormalLengths
    rollout: Layout
    train: Layout
    max_running: int
    updates: int = 4
    passes: int = 1
    trained: int = 1

    @property
    def tokens(self) -> float:
        return self.answers * (self.lengths.mean + self.prompt)

    @property
    def deviation(self) -> float:
        return self.lengths.deviation * self.lengths.mean / (self.lengths.mean + self.prompt)

    @property
    def context(self) -> float:
        """Tokens attended to by each token in the mean: half of its answer, longer ones more."""
        return (self.lengths.mean + self.prompt) * (1 + self.deviation**2) / 2

    @cache  # noqa: B019 - a handful of workloads, alive as long as the module
    def generation(self, lanes: int, rates: Rates, until: float = float("inf")) -> Generation:
        """Of a sample of the replicas, each with its share of the answers."""
        replicas = lanes // self.rollout.lanes
        played = min(replicas, PLAYED_REPLICAS)
        groups = round(self.answers / self.group * played / replicas)
        lengths = self.lengths.sample(groups * self.group)
        prompts = self.answers / self.group * self.prompt / replicas
        start = prefill_seconds(
            self.model, prompts, self.prompt / 2, self.device, self.rollout, rates
        )
        wanted = requests(lengths, self.prompt, self.group)
        return generate(wanted, played, self.step_seconds(rates), self.max_running, until, start)

    def step_seconds(self, rates: Rates) -> Callable[[float, float], float]:
        return lambda running, kv_tokens: decode_step_seconds(
            self.model, running, kv_tokens, self.device, self.rollout, rates
        )

    def forward(self, lanes: int, rates: Rates) -> float:
        """One forward pass over all answers."""
        return log_probability_seconds(
            self.model, self.tokens, self.context, lanes, self.device, self.train, rates,
            self.answers, self.deviation,
        )  # fmt: skip

    def training(self, lanes: int, rates: Rates) -> float:
        """One model's training on all answers."""
        return training_seconds(
            self.model, self.tokens, self.context, lanes, self.device, self.train, rates,
            self.answers, self.deviation, self.updates,
        )  # fmt: skip

    def fits(self, lanes: int) -> bool:
        """Whether so many lanes hold a trainer: weights and gradients by layout, state by lanes."""
        per_lane = 4 * self.model.parameters / self.train.lanes
        per_lane += (ADAM_BYTES - 4) * self.model.parameters / lanes
        return per_lane <= self.device.usable_bytes

    def switching(self, lanes: int) -> float:
        """A step's moves on all lanes: generator out and back, trainers out and back, publish."""
        generator = self.model.weight_bytes / self.rollout.lanes
        trainer = self.trained * ADAM_BYTES * self.model.parameters / lanes
        moved = 2 * host_copy_seconds(generator + trainer, self.device)
        return moved + publish_seconds(self.model, self.device, self.device, self.rollout, True)


def temporal(work: Reasoning, lanes: int, rates: Rates, slower: Slower | None = None) -> float:
    """Seconds of a step whose phases take turns on all lanes."""
    slower = slower or Slower()
    return (
        slower.rollout * work.generation(lanes, rates).seconds
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


def spatial(work: Reasoning, split: tuple[int, int, int], rates: Rates) -> float:
    """Seconds of a step on disjoint lanes: answers stream from stage to stage as they finish."""
    generating, forwarding, training = split
    answers = work.generation(generating, rates)
    scored = consume(answers.finished, work.forward(forwarding, rates) / answers.tokens)
    complete = by_whole_groups(scored)
    trained = consume(complete, work.training(training, rates) / answers.tokens)
    publish = publish_seconds(work.model, work.device, work.device, work.rollout, False)
    return trained[-1].seconds + publish


def best_spatial(work: Reasoning, lanes: int, rates: Rates) -> tuple[float, tuple[int, int, int]]:
    """The fastest split, and its seconds."""
    return min((spatial(work, split, rates), split) for split in splits(work, lanes))


def time_varying(work: Reasoning, lanes: int, rates: Rates) -> tuple[float, str]:
    """The fastest switch point, of several shares of finished answers and of kept lanes.

    All lanes generate until the point. Then the unfinished answers move together onto the lanes
    that keep generating, caches and all, and the others onload the trainers, compute
    log-probabilities and train as answers come; trainers of several models share those lanes. Where
    generation ends the kept lanes stay idle: to give them back would be a second switch.
    """
    whole = work.generation(lanes, rates)
    best = (temporal(work, lanes, rates), "never")
    for share in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        at = whole.seconds_of_share(share)
        until = work.generation(lanes, rates, until=at)
        done = list(until.finished)
        for part in (2, 4, 8, 16):
            kept = lanes // part // work.rollout.lanes * work.rollout.lanes
            freed = (lanes - kept) // work.train.lanes * work.train.lanes
            if not kept or not freed:
                continue
            replicas = max(1, round(whole.replicas * kept / lanes))
            context = sum(request.context for request in until.left)
            cache = context * work.model.kv_bytes_per_token * lanes / kept / whole.replicas
            moving = cache / work.rollout.lanes / work.device.network_bytes_per_second
            tail = generate(
                until.left, replicas,
                work.step_seconds(rates), work.max_running * part, start=at + moving,
            )  # fmt: skip
            answers = [*done, *tail.finished]
            each = work.passes * work.forward(freed, rates)
            each += work.trained * work.training(freed, rates)
            ready = at + work.switching(lanes) / 2
            trained = consume(by_whole_groups(answers), each / whole.tokens, ready)
            seconds = trained[-1].seconds + work.switching(lanes) / 2
            best = min(best, (seconds, f"at {share:.0%} finished, {kept} of {lanes} lanes go on"))
    return best


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
    updates: int = 4

    def training(self, lanes: int, rates: Rates) -> float:
        return action_training_seconds(
            self.policy, self.envs * self.steps, lanes, self.device, rates, self.updates
        )

    def turns(self, simulating: int, acting: int, rates: Rates) -> float:
        """All steps of two groups of environments that take turns on disjoint lanes."""
        group = self.envs / 2
        world = self.simulator.seconds(group / simulating)
        policy = action_seconds(self.policy, group / acting, self.device, rates)
        return self.steps * max(world + policy, 2 * world, 2 * policy) + min(world, policy)

    @property
    def switching(self) -> float:
        trainer = ADAM_BYTES * self.policy.parameters / 8
        return 2 * host_copy_seconds(trainer, self.device)


def embodied_temporal(work: Embodied, lanes: int, rates: Rates, slower: Slower) -> float:
    """Simulator and policy take turns on all lanes; then training."""
    world = work.simulator.seconds(work.envs / lanes)
    policy = action_seconds(work.policy, work.envs / lanes, work.device, rates)
    looping = work.steps * (world + slower.rollout * policy)
    return looping + slower.training * work.training(lanes, rates) + work.switching


def embodied_hybrid(work: Embodied, lanes: int, rates: Rates) -> tuple[float, str]:
    """The best split of simulator and policy side by side; training on all lanes."""
    found = [
        (work.turns(n, lanes - n, rates) + work.training(lanes, rates) + work.switching,
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
