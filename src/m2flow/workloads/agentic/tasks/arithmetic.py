"""Products of two numbers: too hard for a small model's head, easy with a calculator.

`347*285=` is answered at once, `#98895`, or the product is asked of the calculator first. Warm-up
shows both; only the calculator is reliable, and that is what reinforcement finds.
"""

from __future__ import annotations

import random

from m2flow.errors import UserError
from m2flow.tools import ToolCall
from m2flow.workloads.reasoning.tasks.problem import Problem, generator, reserved


class Arithmetic:
    """Products of two numbers.

    Args:
        seed: fixes the training problems and the demonstrations; held-out problems are the same
            for every seed.
        min_digits, max_digits: of each number.
        tool_share: the share of the demonstrations that ask the calculator.

    Raises:
        UserError: a range of digits that is empty or outside 1 to 9, or a share outside 0 to 1.
    """

    name = "arithmetic"
    characters: str | None = None
    num_train: int | None = None

    def __init__(
        self, *, seed: int = 0, min_digits: int = 3, max_digits: int = 3, tool_share: float = 0.3
    ) -> None:
        if not 1 <= min_digits <= max_digits <= 9:
            raise UserError(
                "numbers cannot have so many digits",
                key="data.options.min_digits, data.options.max_digits",
                value=(min_digits, max_digits),
                expected="1 <= min_digits <= max_digits <= 9",
            )
        check_share(tool_share)
        self.seed, self.tool_share = seed, tool_share
        self._digits = min_digits, max_digits

    def train(self, index: int) -> Problem:
        """Training problem number `index`: never one that is held out."""
        return _problem(*self._training_pair(generator("arithmetic", "train", self.seed, index)))

    def held_out(self, count: int) -> list[Problem]:
        """`count` different problems, for every seed the same; fewer where few exist."""
        draw, pairs = generator("arithmetic", "held out"), dict[tuple[int, int], None]()
        for _ in range(5000 + 100 * count):
            pair = self._pair(draw)
            if len(pairs) < count and _is_reserved(pair):
                pairs[pair] = None
        return [_problem(*pair) for pair in pairs]

    def demonstration(self, index: int) -> tuple[str, list[str | ToolCall]]:
        """(prompt, turns) number `index`."""
        draw = generator("arithmetic", "demonstration", self.seed, index)
        a, b = self._training_pair(draw)
        asked: list[str | ToolCall] = [ToolCall("calculator", {"formula": f"{a}*{b}"})]
        if draw.random() >= self.tool_share:
            asked = []
        return f"{a}*{b}=", [*asked, f"#{a * b}"]

    def _training_pair(self, draw: random.Random) -> tuple[int, int]:
        for _ in range(1000):
            pair = self._pair(draw)
            if not _is_reserved(pair):
                return pair
        raise AssertionError("one draw in sixteen is held out, not a thousand in a row")

    def _pair(self, draw: random.Random) -> tuple[int, int]:
        def number() -> int:
            digits = draw.randint(*self._digits)
            return draw.randint(10 ** (digits - 1), 10**digits - 1)

        return number(), number()


def check_share(tool_share: float) -> None:
    """Refuse a share of demonstrations that is none."""
    if not 0 <= tool_share <= 1:
        raise UserError(
            "must be a share",
            key="data.options.tool_share",
            value=tool_share,
            expected="0 <= tool_share <= 1",
        )


def _problem(a: int, b: int) -> Problem:
    return Problem(prompt=f"{a}*{b}=", answer=str(a * b))


def _is_reserved(pair: tuple[int, int]) -> bool:
    return reserved(f"{min(pair)}*{max(pair)}", one_in=16)
