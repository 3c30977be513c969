"""What a step draws of answers that go on in later steps, in the mean of many steps.

A step draws at most so many tokens of each answer, and asks a group again until its longest answer
has ended. So the answers of a step are of groups of all ages: some begin, some go on, and some have
ended and wait for others of their group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from m2flow.models.lengths import LogNormalLengths

ANSWERS = 516
"""That lengths are taken from, the shortest first, for equal shares of all answers."""

WAITING_TOKENS = 1.0
"""That stand for those of an answer which has ended, and is handed on as it was."""


@dataclass(frozen=True)
class Pieces:
    """The answers of a step.

    Attributes:
        drawn: tokens that it draws of them, for equal shares of the answers.
        steps: in which a group is asked, in the mean.
        there: tokens of an answer that are there before and that a prefill reads, in the mean.
        context: tokens that each of these attends to in the mean, the prompt aside.
    """

    drawn: tuple[float, ...]
    steps: float
    there: float
    context: float

    @classmethod
    def of(cls, lengths: LogNormalLengths, most: int, group: int) -> Pieces:
        """Return the answers of a step.

        Args:
            lengths: of whole answers.
            most: tokens that a step draws of an answer.
            group: answers to a prompt.
        """
        answers = lengths.stratified(ANSWERS)
        drawn: list[float] = []
        there: list[int] = []
        for length in answers:
            begun = [number * most for number in range(math.ceil(length / most))]
            drawn += [min(length - before, most) for before in begun]
            there += begun
        steps = 1.0
        for tokens in range(most, lengths.maximum, most):
            ended = sum(length <= tokens for length in answers) / ANSWERS
            steps += 1 - ended**group
        asked = steps * ANSWERS
        waiting = [WAITING_TOKENS] * round(asked - len(drawn))
        squares = sum(tokens**2 for tokens in there)
        return cls(
            tuple(sorted(drawn + waiting)),
            steps,
            sum(there) / asked,
            squares / (2 * max(1, sum(there))),
        )
