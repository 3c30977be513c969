"""Addition of two numbers, at once or column by column: a task that a small model can learn.

`347+285=` is answered at once, `#632`, or with thought, `12,13,06#632`: the column sums from the
lowest digit, carry included, two digits each. Warm-up shows both; only thinking is reliable, and
that is what reinforcement finds. `m2flow.rewards.addition_reward` scores answers.
"""

from __future__ import annotations

import random

from m2flow.errors import UserError
from m2flow.workloads.reasoning.tasks.problem import Problem, generator, reserved

CHARACTERS = "0123456789+=,#"


class Addition:
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

    name = "addition"
    characters: str | None = CHARACTERS
    num_train: int | None = None

    def __init__(
        self,
        *,
        seed: int = 0,
        min_digits: int = 3,
        max_digits: int = 4,
        equal_lengths: bool = True,
        thinking_share: float = 0.5,
    ) -> None:
        if not 1 <= min_digits <= max_digits <= 18:
            raise UserError(
                "numbers cannot have so many digits",
                key="data.options.min_digits, data.options.max_digits",
                value=(min_digits, max_digits),
                expected="1 <= min_digits <= max_digits <= 18",
            )
        if not 0 <= thinking_share <= 1:
            raise UserError(
                "must be a share",
                key="data.options.thinking_share",
                value=thinking_share,
                expected="0 <= thinking_share <= 1",
            )
        self.seed = seed
        self.thinking_share = thinking_share
        self.digits = (min_digits, max_digits)
        self.equal_lengths = equal_lengths

    def train(self, index: int) -> Problem:
        """Training problem number `index`: never one that is held out."""
        return _problem(*self._training_pair(generator("addition", "train", self.seed, index)))

    def held_out(self, count: int) -> list[Problem]:
        """`count` different problems, for every seed the same; fewer where few exist."""
        draw = generator("addition", "held out")
        pairs: dict[tuple[int, int], None] = {}
        for _ in range(5000 + 100 * count):
            if len(pairs) == count:
                break
            pair = self._pair(draw)
            if _is_reserved(pair):
                pairs[pair] = None
        return [_problem(*pair) for pair in pairs]

    def demonstration(self, index: int) -> tuple[str, str]:
        """(prompt, completion) number `index` for warm-up, some of them with thought."""
        draw = generator("addition", "demonstration", self.seed, index)
        a, b = self._training_pair(draw)
        thought = column_sums(a, b) if draw.random() < self.thinking_share else ""
        return f"{a}+{b}=", f"{thought}#{a + b}"

    def _training_pair(self, draw: random.Random) -> tuple[int, int]:
        for _ in range(1000):
            pair = self._pair(draw)
            if not _is_reserved(pair):
                return pair
        raise AssertionError("one draw in sixteen is held out, not a thousand in a row")

    def _pair(self, draw: random.Random) -> tuple[int, int]:
        first = draw.randint(*self.digits)
        second = first if self.equal_lengths else draw.randint(*self.digits)
        return _number(draw, first), _number(draw, second)


def column_sums(a: int, b: int) -> str:
    """The thought: sums of the columns with carry, lowest first: `12,13,06` for 347 and 285."""
    columns = []
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        columns.append(f"{column:02d}")
        carry = column // 10
    return ",".join(columns)


def _number(draw: random.Random, digits: int) -> int:
    return draw.randint(10 ** (digits - 1), 10**digits - 1)


def _problem(a: int, b: int) -> Problem:
    return Problem(prompt=f"{a}+{b}=", answer=str(a + b))


def _is_reserved(pair: tuple[int, int]) -> bool:
    # Sorted: 3+5 would give 5+3 away.
    return reserved(f"{min(pair)}+{max(pair)}", one_in=16)
