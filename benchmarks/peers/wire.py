"""The line protocol between the driver and a side, and the words both use.

The driver writes a settings line, then one request line for each block of steps; the side answers
each request with the records of its steps, and between two requests it waits and uses no
processor. Standard output belongs to the protocol: whatever a library prints goes to standard
error. Standard library only, for each side imports this file in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

S = TypeVar("S")


@dataclass(frozen=True)
class Settings:
    """What one side is to run; the same for both but for `extra`.

    Attributes:
        task: `addition` or `countdown`.
        checkpoint: folder in Hugging Face layout, with its tokenizer.
        max_new_tokens: the longest completion.
        seed: decides the prompts (alike on both sides) and each side's own sampling.
        max_steps: how many steps may be asked for, all blocks together.
        cores: processor cores that the side may use.
        extra: options of one side alone, such as a switch that is turned off.
    """

    task: str
    checkpoint: str
    max_new_tokens: int
    seed: int
    max_steps: int
    cores: int
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    minibatches: int = 2
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_per_minibatch(self) -> int:
        return self.samples_per_step // self.minibatches

    def to_json(self) -> str:
        """One line, as `Wire.settings` reads it."""
        return json.dumps(asdict(self))


class Sample(NamedTuple):
    """One completion: number of its problem in the run, reward, length in tokens with the end."""

    problem: int
    reward: float
    num_tokens: int


@dataclass(frozen=True)
class StepRecord:
    """One training step: its wall-clock seconds and, in order of problem, rewards and lengths.

    Of control: returns and lengths of the episodes that ended in it.
    """

    seconds: float
    rewards: list[float]
    num_tokens: list[int]

    @classmethod
    def of(cls, seconds: float, samples: Iterable[Sample]) -> StepRecord:
        """The record of samples in any order."""
        ordered = sorted(samples, key=lambda sample: sample.problem)
        return cls(
            seconds,
            [sample.reward for sample in ordered],
            [sample.num_tokens for sample in ordered],
        )


class Wire:
    """A side's end of the protocol."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def settings(self, kind: Callable[..., S]) -> S:
        """The first line: what to run, as `kind` holds it."""
        return kind(**json.loads(sys.stdin.readline()))

    def next_request(self, done: list[StepRecord]) -> int:
        """Answer the last request and wait for the next: steps wanted, 0 at the end of input.

        The first call answers with no records, which tells the driver that the side is ready.
        """
        print(json.dumps([asdict(record) for record in done]), file=self._answers, flush=True)
        line = sys.stdin.readline()
        return int(json.loads(line)["steps"]) if line else 0
