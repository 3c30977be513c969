"""Addition of two numbers, at once or column by column: a task that a small model can learn.

`347+285=` is answered at once, `#632`, or with thought, `12,13,06#632`: the column sums from the
lowest digit, carry included, two digits each. Warm-up shows both; only thinking is reliable, and
that is what reinforcement finds. `m2flow.rewards.addition_reward` scores answers.
"""

from __future__ import annotations

import random

from m2flow.workloads.reasoning.tasks.pairs import PairTask, check_share, number_of
from m2flow.workloads.reasoning.tasks.problem import generator

CHARACTERS = "0123456789+=,#"


class Addition(PairTask):
    """Sums of two numbers of equally many digits.

    Args:
        seed: fixes the training problems and the demonstrations; held-out problems are the same
            for every seed.
        min_digits, max_digits: each problem draws its number of digits from this range.
        equal_lengths: whether both numbers of a problem have the same number of digits; else each
            draws its own.
        thinking_share: the share of the demonstrations that think first. What is shown less often
            is what a greedy model does not do after the warm-up.

    Raises:
        UserError: a range of digits that is empty or outside 1 to 18, or a share outside 0 to 1.
    """

    name, sign = "addition", "+"
    characters = CHARACTERS

    def __init__(
        self,
        *,
        seed: int = 0,
        min_digits: int = 3,
        max_digits: int = 4,
        equal_lengths: bool = True,
        thinking_share: float = 0.5,
    ) -> None:
        super().__init__(seed, (min_digits, max_digits), most_digits=18)
        check_share("thinking_share", thinking_share)
        self.thinking_share, self.equal_lengths = thinking_share, equal_lengths

    def result(self, a: int, b: int) -> int:
        return a + b

    def demonstration(self, index: int) -> tuple[str, str]:
        """(prompt, completion) number `index` for warm-up, some of them with thought."""
        draw = generator("addition", "demonstration", self.seed, index)
        a, b = self.training_pair(draw)
        thought = column_sums(a, b) if draw.random() < self.thinking_share else ""
        return self.prompt(a, b), f"{thought}#{a + b}"

    def draw_pair(self, draw: random.Random) -> tuple[int, int]:
        first = draw.randint(*self.digits)
        second = first if self.equal_lengths else draw.randint(*self.digits)
        return number_of(draw, first), number_of(draw, second)


def column_sums(a: int, b: int) -> str:
    """The thought: sums of the columns with carry, lowest first: `12,13,06` for 347 and 285."""
    columns = []
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        columns.append(f"{column:02d}")
        carry = column // 10
    return ",".join(columns)
