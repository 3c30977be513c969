"""Closed forms of the execution modes over analytic phase times, for the rows of published tables.

*Temporal*: the phases one after another on all lanes, with switching. *Spatial*: disjoint lanes, a
pipeline of single answers with its fill and its tail. For loops with a simulator: temporal, spatial
(training has lanes of its own) and hybrid (simulator and policy side by side in two groups of
environments that take turns, training on all lanes).

These are the modes as their authors run them, whose generators span several lanes and whose states
wait in memory that is not pinned; what a phase takes is the product's own roofline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from embodied_prices import ActionModel, Simulator

from m2flow.models.lengths import Answers
from m2flow.models.shape import WEIGHT_BYTES, ModelShape
from m2flow.models.work import (
    ADAM_BYTES,
    FORWARD_AND_BACKWARD,
    LOGIT_BYTES,
    RECOMPUTED_FORWARD,
    Rates,
    decoding,
    fullest,
    prefill,
    ring_bytes,
)
from m2flow.plan.profile.hardware import NETWORK_FRACTION, PCIE_FRACTION, Device
from m2flow.plan.profile.streaming import finish_times
from m2flow.plan.profile.work import Work

ACTIVATION_BYTES = 34
"""Of a layer, token and unit of width, without the attention scores, which fused kernels never
store (Korthikanti et al. 2022, equation 1): those systems' own modules."""

PAGEABLE_FRACTION = PCIE_FRACTION / 4.5
"""Copies from and to memory that is not pinned: DeepSpeed's change 5301 made copies of optimizer
state four to five times faster on machines of 8 accelerators by pinning it. m2flow pins."""

PLAYED_REPLICAS = 32
"""Generating replicas that are played; more of them are alike."""


@dataclass(frozen=True)
class Slower:
    """How many times as long another system takes for a phase."""

    rollout: float = 1.0
    forward: float = 1.0
    training: float = 1.0


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer that is done: after how many seconds, its tokens with the prompt, its group."""

    seconds: float
    tokens: float
    group: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """How another system's replica of a model is cut: layers, the row of layers, experts.

    Pipeline stages wait for each other at the start and the end of an update. Experts are spread
    over data-parallel replicas, so that tokens go to their experts and back.
    """

    tensor: int
    pipeline: int = 1
    expert: int = 1

    @property
    def lanes(self) -> int:
        return self.tensor * self.pipeline

    def passes(
        self, model: ModelShape, answers: Answers, count: float, lanes: int, passes: float,
        share: float, device: Device, updates: int = 1,
    ) -> float:  # fmt: skip
        """Seconds of so many forward passes' work on all answers."""
        replicas = min(max(1, lanes // self.lanes), max(1, int(count)))
        tokens = count * answers.tokens / replicas
        each = count / replicas / updates
        bubble = 1 + (self.pipeline - 1) / max(1.0, each)
        arithmetic = Work(
            bubble * passes * model.forward_flops(tokens, answers.context) / self.lanes,
            arithmetic=share,
        )
        message = tokens * model.hidden * WEIGHT_BYTES
        # A layer's backward pass has as many collectives as a forward pass, not twice as many.
        rounds = max(1.0, passes - 1) / self.pipeline
        sums = 2 * model.layers * ring_bytes(message, self.tensor)
        experts = 2 * model.layers * (self.expert - 1) / self.expert
        experts *= message * model.experts_per_token / self.tensor
        everyone = self.expert * self.tensor
        wires = (
            Work(sent_bytes=rounds * sums, span=self.tensor),
            Work(sent_bytes=rounds * experts, span=everyone, apart=everyone),
        )
        seconds = sum(one.on(device) for one in (arithmetic, *wires))
        return fullest(replicas, each, answers.deviation) * seconds

    def update(self, model: ModelShape, lanes: int, device: Device) -> float:
        """Seconds of one optimizer step: gradients scattered, new weights gathered."""
        held = max(1, lanes // self.lanes)
        return Work(
            read_bytes=2 * ADAM_BYTES * model.parameters / (held * self.lanes),
            sent_bytes=ring_bytes(model.weight_bytes / self.lanes, held),
            span=held * self.lanes,
            apart=self.lanes,
        ).on(device)

    def state_bytes(self, model: ModelShape, lanes: int) -> float:
        """On each lane: weights and gradients of its part, its share of the optimizer."""
        dense = model.parameters - model.expert_parameters
        held = (dense + model.expert_parameters / self.expert) / self.lanes
        return 4 * held + (ADAM_BYTES - 4) * model.parameters / lanes

    def bytes_taken(self, model: ModelShape, lanes: int, tokens: int) -> float:
        """The state, and a micro-batch of so many tokens whose activations are recomputed."""
        kept = (2 * model.layers / self.pipeline + ACTIVATION_BYTES) * model.hidden
        kept += LOGIT_BYTES * model.vocabulary
        return self.state_bytes(model, lanes) + kept * tokens / self.tensor


@dataclass(frozen=True)
class Reasoning:
    """A step of GRPO or PPO on a language model.

    Attributes:
        number: of answers.
        group: answers to a prompt.
        rollout: lanes of a generating replica; `train`: how a trainer's is cut.
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
    rollout: int
    train: Parallel
    max_running: int
    sharing: int
    updates: int = 4
    passes: int = 1
    trained: int = 1

    @property
    def tokens(self) -> float:
        return self.number * self.answers.tokens

    @cache  # noqa: B019 - a handful of workloads, alive as long as the module
    def generation(self, lanes: int, rates: Rates, limit: int) -> list[Finished]:
        """Of a sample of the replicas, each with its share of the answers, in order of time."""
        replicas = lanes // self.rollout
        played = min(replicas, PLAYED_REPLICAS)
        groups = round(self.number / self.group * played / replicas)
        prompt = self.answers.prompt_tokens
        own = self.number / self.group * prompt / replicas
        start = prefill(self.model, own, prompt / 2, self.rollout, rates).on(self.device)

        def step(running: float, kv_tokens: float) -> float:
            return decoding(self.model, running, kv_tokens, self.rollout, rates).on(self.device)

        lengths = self.answers.lengths.sample(groups * self.group)
        finished = []
        for replica in range(played):
            mine = [n for n in range(len(lengths)) if n // self.group % played == replica]
            ends = finish_times([lengths[n] for n in mine], step, limit, prompt)
            finished += [
                Finished(start + end, prompt + lengths[n], n // self.group)
                for n, end in zip(mine, ends, strict=True)
            ]
        return sorted(finished, key=lambda answer: answer.seconds)

    def rolling_out(self, lanes: int, rates: Rates, limit: int) -> float:
        """Until the last answer."""
        return self.generation(lanes, rates, limit)[-1].seconds

    def forward(self, lanes: int, rates: Rates) -> float:
        """One forward pass over all answers."""
        share = rates.arithmetic(self.model, rates.forward)
        return self.train.passes(
            self.model, self.answers, self.number, lanes, 1.0, share, self.device
        )

    def training(self, lanes: int, rates: Rates) -> float:
        """One model's training on all answers, activations computed again."""
        passes = FORWARD_AND_BACKWARD + RECOMPUTED_FORWARD
        share = rates.arithmetic(self.model, rates.training)
        seconds = self.train.passes(
            self.model, self.answers, self.number, lanes, passes, share, self.device, self.updates
        )
        return seconds + self.updates * self.train.update(self.model, lanes, self.device)

    def fits(self, lanes: int) -> bool:
        """Whether so many lanes hold a trainer."""
        taken = self.train.bytes_taken(self.model, lanes, self.answers.longest)
        return taken <= self.device.usable_bytes

    def switching(self, lanes: int) -> float:
        """A step's moves on all lanes: states brought and taken away for each phase, publishing.

        The generator comes and goes, as do weights for each pass, and a trainer for its training.
        """
        weights = self.model.weight_bytes / self.train.lanes
        moved = self.model.weight_bytes / self.rollout
        moved += self.passes * weights
        moved += self.trained * self.train.state_bytes(self.model, lanes)
        copying = 2 * moved / (self.device.host_bytes_per_second * PAGEABLE_FRACTION)
        return copying + self.publishing(self.device.collective_bytes_per_second(self.rollout))

    def publishing(self, rate: float) -> float:
        """Each lane of a generating replica takes its share; all receive at once."""
        return self.model.weight_bytes / self.rollout / rate


def temporal(work: Reasoning, lanes: int, rates: Rates, slower: Slower | None = None) -> float:
    """Seconds of a step whose phases take turns on all lanes."""
    slower = slower or Slower()
    return (
        slower.rollout * work.rolling_out(lanes, rates, work.sharing)
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
            enough = generating > 0 and generating % work.rollout == 0
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


def by_whole_groups(arrivals: Sequence[Finished]) -> list[Finished]:
    """The same answers, each there only when the last of its group is: what advantages need."""
    last: dict[int, float] = {}
    for answer in arrivals:
        last[answer.group] = max(last.get(answer.group, 0.0), answer.seconds)
    there = [Finished(last[answer.group], answer.tokens, answer.group) for answer in arrivals]
    return sorted(there, key=lambda answer: answer.seconds)


def spatial(work: Reasoning, split: tuple[int, int, int], rates: Rates) -> float:
    """Seconds of a step on disjoint lanes: answers stream from stage to stage as they finish."""
    generating, forwarding, training = split
    answers = work.generation(generating, rates, work.max_running)
    tokens = math.fsum(answer.tokens for answer in answers)
    scored = consume(answers, work.forward(forwarding, rates) / tokens)
    complete = by_whole_groups(scored)
    trained = consume(complete, work.training(training, rates) / tokens)
    return trained[-1].seconds + work.publishing(
        work.device.network_bytes_per_second * NETWORK_FRACTION
    )


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
        passes = self.policy.train(self.envs * self.steps, lanes, rates).on(self.device)
        return passes + self.updates * self.policy.update(lanes).on(self.device)

    def turns(self, simulating: int, acting: int, rates: Rates) -> float:
        """All steps of two groups of environments that take turns on disjoint lanes."""
        group = self.envs // 2
        world = self.simulator.seconds(-(-group // simulating))
        policy = self.policy.act(-(-group // acting), rates).on(self.device)
        return self.steps * max(world + policy, 2 * world, 2 * policy) + min(world, policy)

    def switching(self, lanes: int) -> float:
        """The policy that acts makes room for its trainer, and comes back with new weights."""
        moved = self.policy.parameters * (WEIGHT_BYTES + ADAM_BYTES / lanes)
        return 2 * moved / (self.device.host_bytes_per_second * PAGEABLE_FRACTION)


def embodied_temporal(work: Embodied, lanes: int, rates: Rates, slower: Slower) -> float:
    """Simulator and policy take turns on all lanes; then training."""
    world = work.simulator.seconds(work.envs / lanes)
    policy = work.policy.act(work.envs / lanes, rates).on(work.device)
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
