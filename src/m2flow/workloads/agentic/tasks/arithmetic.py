"""Products of two numbers: too hard for a small model's head, easy with a calculator.

`347*285=` is answered at once, `#98895`, or the product is asked of the calculator first. Warm-up
shows both; only the calculator is reliable, and that is what reinforcement finds.
"""

from __future__ import annotations

import random

from m2flow.tools import ToolCall
from m2flow.workloads.reasoning.tasks.pairs import PairTask, check_share, number_of
from m2flow.workloads.reasoning.tasks.problem import generator


class Arithmetic(PairTask):
    """Products of two numbers.

    Args:
        seed: fixes the training problems and the demonstrations; held-out problems are the same
            for every seed.
        min_digits, max_digits: of each number.
        tool_share: the share of the demonstrations that ask the calculator.

    Raises:
        UserError: a range of digits that is empty or outside 1 to 9, or a share outside 0 to 1.
    """

    name, sign = "arithmetic", "*"

    def __init__(
        self, *, seed: int = 0, min_digits: int = 3, max_digits: int = 3, tool_share: float = 0.3
    ) -> None:
        super().__init__(seed, (min_digits, max_digits), most_digits=9)
        check_share("tool_share", tool_share)
        self.tool_share = tool_share

    def result(self, a: int, b: int) -> int:
        return a * b

    def demonstration(self, index: int) -> tuple[str, list[str | ToolCall]]:
        """(prompt, turns) number `index`."""
        draw = generator("arithmetic", "demonstration", self.seed, index)
        a, b = self.training_pair(draw)
        asked: list[str | ToolCall] = [ToolCall("calculator", {"formula": f"{a}*{b}"})]
        if draw.random() >= self.tool_share:
            asked = []
        return self.prompt(a, b), [*asked, f"#{a * b}"]

    def draw_pair(self, draw: random.Random) -> tuple[int, int]:
        first = number_of(draw, draw.randint(*self.digits))
        return first, number_of(draw, draw.randint(*self.digits))
