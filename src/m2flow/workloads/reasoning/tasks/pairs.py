"""What tasks about two numbers share: problems of a seed, and pairs that are held out.

One pair in sixteen is held out, for every seed the same, and so is the pair the other way around.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod

from m2flow.errors import UserError
from m2flow.workloads.reasoning.tasks.problem import Problem, generator, reserved

_log = logging.getLogger(__name__)


class PairTask(ABC):
    """Problems `a SIGN b=`.

    Args:
        seed: fixes the training problems and the demonstrations; held-out problems are the same
            for every seed.
        digits: the fewest and the most digits of a number.
        most_digits: the largest number of digits that the task allows.

    Raises:
        UserError: `digits` is an empty range, or outside 1 to `most_digits`.
    """

    name: str
    sign: str
    characters: str | None = None
    num_train: int | None = None

    def __init__(self, seed: int, digits: tuple[int, int], most_digits: int) -> None:
        if not 1 <= digits[0] <= digits[1] <= most_digits:
            raise UserError(
                "numbers cannot have so many digits",
                key="data.options.min_digits, data.options.max_digits",
                value=digits,
                expected=f"1 <= min_digits <= max_digits <= {most_digits}",
            )
        self.seed, self.digits = seed, digits

    @abstractmethod
    def result(self, a: int, b: int) -> int:
        """The right answer."""

    @abstractmethod
    def draw_pair(self, draw: random.Random) -> tuple[int, int]:
        """Two numbers, held out or not."""

    def train(self, index: int) -> Problem:
        """Training problem number `index`: never one that is held out."""
        return self._problem(self.training_pair(generator(self.name, "train", self.seed, index)))

    def held_out(self, count: int) -> list[Problem]:
        """`count` different problems, for every seed the same; fewer where few exist."""
        draw, pairs = generator(self.name, "held out"), dict[tuple[int, int], None]()
        for _ in range(5000 + 100 * count):
            if len(pairs) == count:
                break
            pair = self.draw_pair(draw)
            if self._is_reserved(pair):
                pairs[pair] = None
        if len(pairs) < count:
            _log.warning("%s: %d problems are held out: there are no more", self.name, len(pairs))
        return [self._problem(pair) for pair in pairs]

    def training_pair(self, draw: random.Random) -> tuple[int, int]:
        """Two numbers that are not held out."""
        for _ in range(1000):
            pair = self.draw_pair(draw)
            if not self._is_reserved(pair):
                return pair
        raise AssertionError("one draw in sixteen is held out, not a thousand in a row")

    def prompt(self, a: int, b: int) -> str:
        """The text of a problem."""
        return f"{a}{self.sign}{b}="

    def _problem(self, pair: tuple[int, int]) -> Problem:
        return Problem(prompt=self.prompt(*pair), answer=str(self.result(*pair)))

    def _is_reserved(self, pair: tuple[int, int]) -> bool:
        # Sorted: 3+5 would give 5+3 away.
        return reserved(f"{min(pair)}{self.sign}{max(pair)}", one_in=16)


def number_of(draw: random.Random, digits: int) -> int:
    """Draw a number of so many digits."""
    return draw.randint(10 ** (digits - 1), 10**digits - 1)


def check_share(name: str, share: float) -> None:
    """Refuse an option of a task that is no share."""
    if not 0 <= share <= 1:
        raise UserError(
            "must be a share",
            key=f"data.options.{name}",
            value=share,
            expected=f"0 <= {name} <= 1",
        )
