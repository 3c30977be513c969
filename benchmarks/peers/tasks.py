"""The two tasks that both sides of the comparison learn: prompts, answers, rewards, warm-up data.

Everything is a function of a seed, so two processes with nothing in common see the same prompts in
the same order. The reward rule lives here alone: a side that scores by another rule does not
measure the same thing. Standard library only, because each side imports this file in an
environment of its own.

`addition` is the quick start's task. `countdown` is the long-tailed one: the prompt is a number
and the answer counts from it down to zero, so the prompt decides how long the answer is, whoever
generates it and however well it has learnt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

PAD, END = "<pad>", "<end>"


@dataclass(frozen=True)
class Problem:
    """A prompt and what a right completion is; `completion_tokens` counts the end token."""

    prompt: str
    solution: str
    completion_tokens: int


@dataclass(frozen=True)
class Task:
    """How to draw problems, score completions and make supervised examples of one task.

    Attributes:
        alphabet: the characters; each is one token.
        max_new_tokens: the longest completion that either side may generate, in tokens.
        problems: `problems(count, seed)` gives that many problems, always the same for a seed.
        reward: `reward(completion, ended, solution)`, 0.0 or 1.0; `ended` says whether the end
            token came. The completion is text without special tokens.
        demonstration: a supervised completion for a problem, drawn with the given generator.
    """

    name: str
    alphabet: str
    max_new_tokens: int
    problems: Callable[[int, int], list[Problem]]
    reward: Callable[[str, bool, str], float]
    demonstration: Callable[[Problem, random.Random], str]


# Addition ------------------------------------------------------------------------------------


def _column_sums(left: int, right: int) -> str:
    """`12,13,06` for 347 + 285: each column with its carry, lowest digit first."""
    carry, sums = 0, []
    for column in range(max(len(str(left)), len(str(right)))):
        power = 10**column
        total = left // power % 10 + right // power % 10 + carry
        carry = total // 10
        sums.append(f"{total:02d}")
    return ",".join(sums)


def _addition_problems(count: int, seed: int) -> list[Problem]:
    draw = random.Random(f"addition-{seed}")
    problems = []
    for _ in range(count):
        left, right = (draw.randrange(10 ** (n - 1), 10**n) for n in draw.choices((3, 4), k=2))
        solution = str(left + right)
        completion_tokens = len(_column_sums(left, right)) + len(solution) + 2
        problems.append(Problem(f"{left}+{right}=", solution, completion_tokens))
    return problems


def _addition_reward(completion: str, ended: bool, solution: str) -> float:
    _, mark, answer = completion.rpartition("#")
    return float(ended and bool(mark) and answer == solution)


def _addition_demonstration(problem: Problem, draw: random.Random) -> str:
    """Half of the demonstrations answer at once, half add the columns first."""
    if draw.random() < 0.5:
        return f"#{problem.solution}"
    left, right = problem.prompt.rstrip("=").split("+")
    return f"{_column_sums(int(left), int(right))}#{problem.solution}"


ADDITION = Task(
    name="addition",
    alphabet="0123456789+=,#",
    max_new_tokens=24,
    problems=_addition_problems,
    reward=_addition_reward,
    demonstration=_addition_demonstration,
)

# Countdown -----------------------------------------------------------------------------------

MEAN_TOKENS, SIGMA, MAX_TOKENS = 48.0, 1.0, 384
TOKENS_PER_COUNT = 3
SKIP_PROBABILITY = 0.04
"""How often a demonstration leaves a number out: what reinforcement learning has to mend."""


def _counts_for(num_tokens: float) -> int:
    """The start whose completion (three digits a number, zero included, one end token) is nearest."""
    counts = round((num_tokens - 1) / TOKENS_PER_COUNT)
    return min(max(counts, 1), (MAX_TOKENS - 1) // TOKENS_PER_COUNT)


def _countdown_problem(start: int) -> Problem:
    solution = "".join(f"{number:03d}" for number in reversed(range(start)))
    return Problem(f"{start:03d}:", solution, len(solution) + 1)


def _countdown_problems(count: int, seed: int) -> list[Problem]:
    """Starts whose completions are log-normal in length: mean 48 tokens, sigma 1, cut at 384."""
    draw = random.Random(f"countdown-{seed}")
    location = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    return [
        _countdown_problem(_counts_for(draw.lognormvariate(location, SIGMA))) for _ in range(count)
    ]


def _countdown_reward(completion: str, ended: bool, solution: str) -> float:
    return float(ended and completion == solution)


def _countdown_demonstration(problem: Problem, draw: random.Random) -> str:
    """The solution with some numbers left out; the last one, zero, always stays."""
    numbers = [
        problem.solution[at : at + TOKENS_PER_COUNT]
        for at in range(0, len(problem.solution), TOKENS_PER_COUNT)
    ]
    kept = [number for number in numbers[:-1] if draw.random() >= SKIP_PROBABILITY]
    return "".join([*kept, numbers[-1]])


COUNTDOWN = Task(
    name="countdown",
    alphabet="0123456789:",
    max_new_tokens=MAX_TOKENS,
    problems=_countdown_problems,
    reward=_countdown_reward,
    demonstration=_countdown_demonstration,
)

TASKS = {task.name: task for task in (ADDITION, COUNTDOWN)}
