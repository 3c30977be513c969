"""Countdown: a task whose answers are long-tailed because its prompts say how long they are.

`28:` is answered by `27ab26bb...00ba` and the end token: two digits and two letters a number. So
the prompt decides the length, whoever generates the answer and however well it has learnt; nothing
is cut or padded to make it so. The starts are drawn such that the lengths are log-normal with a
mean of 48 tokens, up to 384.

The letters are free, `a` or `b`, and the warm-up teaches to draw them at random: 0.35 nats a token,
so that the samples of a group part early, as those of language models do. Warm-up also leaves a
number out now and then; that is what reinforcement mends, and it changes a length by four tokens.

Both sides import this file, each in an environment of its own: it needs nothing but m2flow's tasks
and rewards, which import the standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.rewards.reward import WeightedReward
from m2flow.workloads.reasoning.tasks.problem import Problem, Task, generator

MEAN_TOKENS, SIGMA, MAX_TOKENS = 48.0, 1.0, 384
LETTERS = "ab"
TOKENS_PER_NUMBER = 4
SKIPPED = 0.04
"""Share of numbers that a demonstration leaves out."""


class Countdown:
    """Count down from a number to zero; an `m2flow.workloads.reasoning.tasks.DemonstratedTask`."""

    name = "countdown"
    characters: str | None = f"0123456789:{LETTERS}"
    num_train: int | None = None

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def train(self, index: int) -> Problem:
        """Training problem number `index`; its answer is the digits alone."""
        start = _log_normal_start(generator("countdown", "train", self.seed, index))
        return Problem(f"{start:02d}:", "".join(f"{n:02d}" for n in reversed(range(start))))

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
        letters = ["".join(draw.choices(LETTERS, k=2)) for _ in (*kept, 0)]
        written = (f"{n:02d}{pair}" for n, pair in zip((*kept, 0), letters, strict=True))
        return f"{start:02d}:", "".join(written)


def countdown_reward(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """1.0 for every number in its place, letters between, and the end token; else 0.0."""
    numbers = [
        completion[at : at + TOKENS_PER_NUMBER]
        for at in range(0, len(completion), TOKENS_PER_NUMBER)
    ]
    digits = "".join(number[:2] for number in numbers)
    letters = "".join(number[2:] for number in numbers)
    answer = row["answer"]
    right = digits == answer and len(letters) == len(answer) and set(letters) <= set(LETTERS)
    return float(row["finished"] and right)


def reward(name: str) -> WeightedReward:
    """What scores answers to the task of that name."""
    from m2flow.workloads.reasoning.tasks import reward_of_task

    if name == "countdown":
        return WeightedReward("peers.countdown:countdown_reward")
    return WeightedReward(reward_of_task(name))


def task(name: str, seed: int) -> Task:
    """The task that a side's settings name: `countdown`, or one of m2flow's."""
    from m2flow.workloads.reasoning.tasks import make_task

    return Countdown(seed=seed) if name == "countdown" else make_task(name, seed=seed)


def _start_for(num_tokens: float) -> int:
    """The start whose right answer, end token included, is about that long and never too long."""
    nearest = round((num_tokens - 1) / TOKENS_PER_NUMBER)
    return min(max(nearest, 1), (MAX_TOKENS - 1) // TOKENS_PER_NUMBER)


def _log_normal_start(draw: random.Random) -> int:
    return _start_for(draw.lognormvariate(math.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA))
