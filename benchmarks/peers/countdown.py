"""Countdown: a task whose answers are long-tailed because its prompts say how long they are.

`029:` is answered by `028027...001000` and the end token: three tokens a number. So the prompt
decides the length, whoever generates the answer and however well it has learnt; nothing is cut or
padded to make it so. The starts are drawn such that the lengths are log-normal with a mean of 48
tokens, up to 384. Warm-up shows answers in which a number is left out now and then; that is what
reinforcement mends, and it changes a length by three tokens.

Both sides import this file, each in an environment of its own: it needs nothing but m2flow's task
protocol, which is standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from m2flow.reasoning.tasks.problem import Problem, Task, generator

MEAN_TOKENS, SIGMA, MAX_TOKENS = 48.0, 1.0, 384
DIGITS = 3
"""Tokens a number."""
SKIPPED = 0.04
"""Share of numbers that a demonstration leaves out."""


class Countdown:
    """Count down from a number to zero; an `m2flow.reasoning.tasks.DemonstratedTask`."""

    name = "countdown"
    characters: str | None = "0123456789:"
    num_train: int | None = None

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def train(self, index: int) -> Problem:
        """Training problem number `index`."""
        start = _log_normal_start(generator("countdown", "train", self.seed, index))
        return Problem(f"{start:03d}:", _numbers_below(start))

    def held_out(self, count: int) -> list[Problem]:
        """None: there are as many problems as lengths, and training may meet each."""
        return []

    def demonstration(self, index: int) -> tuple[str, str]:
        """(prompt, completion) number `index`: half log-normal in length, half uniform.

        Uniform ones let a short warm-up see long answers often enough. Zero is never left out.
        """
        draw = generator("countdown", "demonstration", self.seed, index)
        longest = _start_for(MAX_TOKENS)
        start = _log_normal_start(draw) if draw.random() < 0.5 else draw.randint(1, longest)
        kept = [n for n in range(start - 1, 0, -1) if draw.random() >= SKIPPED]
        return f"{start:03d}:", "".join(f"{n:03d}" for n in [*kept, 0])

    def score(
        self,
        answer: str,
        completion: str,
        *,
        finished: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> float:
        """1.0 for every number in its place and the end token, else 0.0."""
        return float(finished and completion == answer)


def task(name: str, seed: int) -> Task:
    """The task that a side's settings name: `countdown`, or one of m2flow's."""
    from m2flow.reasoning.tasks import make_task

    return Countdown(seed=seed) if name == "countdown" else make_task(name, seed=seed)


def wanted_tokens(start: int) -> int:
    """Length of the right answer to `start`, end token included."""
    return DIGITS * start + 1


def _start_for(num_tokens: float) -> int:
    """The start whose right answer is about that long, and no longer than the longest allowed."""
    nearest = round((num_tokens - 1) / DIGITS)
    return min(max(nearest, 1), (MAX_TOKENS - 1) // DIGITS)


def _log_normal_start(draw: random.Random) -> int:
    return _start_for(draw.lognormvariate(math.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA))


def _numbers_below(start: int) -> str:
    return "".join(f"{number:03d}" for number in reversed(range(start)))
