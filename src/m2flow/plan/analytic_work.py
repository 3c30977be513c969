"""What a stage does, in words that the roofline understands: generate, pass forward, train, act.

Plain data: a model's shape and what it works on. Which device and how many lanes is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from m2flow.plan.embodied_models import ActionModel, Simulator
from m2flow.plan.lognormal import LogNormalLengths
from m2flow.plan.models import ModelShape


@dataclass(frozen=True, slots=True)
class Answers:
    """What is generated and trained on: prompts, and lengths of the answers, in tokens."""

    prompt_tokens: float
    lengths: LogNormalLengths

    @property
    def tokens(self) -> float:
        """Of an answer and its prompt in the mean."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def longest(self) -> int:
        return math.ceil(self.prompt_tokens + self.lengths.maximum)

    @property
    def deviation(self) -> float:
        """Of an answer and its prompt, over the mean."""
        return self.lengths.deviation * self.lengths.mean / self.tokens

    @property
    def context(self) -> float:
        """Tokens attended to by a token in the mean."""
        return self.tokens * (1 + self.deviation**2) / 2


@dataclass(frozen=True, slots=True)
class Generate:
    """Answers are sampled from a model; `max_running` are limits on requests to offer."""

    model: ModelShape
    answers: Answers
    max_running: tuple[int, ...] = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Forward:
    """One pass over whole answers: log-probabilities, values, a reward model."""

    model: ModelShape
    answers: Answers


@dataclass(frozen=True, slots=True)
class Train:
    """Forward, backward and update; `sharded` for FSDP."""

    model: ModelShape
    answers: Answers
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class Act:
    """A policy's chunk of actions for each observation."""

    policy: ActionModel


@dataclass(frozen=True, slots=True)
class TrainPolicy:
    """A policy's training, an item being `chunks` decisions."""

    policy: ActionModel
    chunks: int


@dataclass(frozen=True, slots=True)
class Simulate:
    """A step of environments, an item being one environment."""

    simulator: Simulator


@dataclass(frozen=True, slots=True)
class Fixed:
    """Seconds of a call and of each item on one lane: a verifier, a function on groups."""

    seconds_per_call: float = 1e-3
    seconds_per_item: float = 0.0


Work = Generate | Forward | Train | Act | TrainPolicy | Simulate | Fixed


def model_name(work: Work) -> str:
    """Of what the stage works on; empty for a fixed price."""
    match work:
        case Generate() | Forward() | Train():
            return work.model.name
        case Act() | TrainPolicy():
            return work.policy.name
        case Simulate():
            return work.simulator.name
    return ""
