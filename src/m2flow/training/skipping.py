"""Optimizer steps that are left out because a loss or gradient is not finite, up to so many.

One bad batch does not end a run; weights or data that are broken give one after the other, and do.
The optimizer has left weights and state as they were, on every replica alike.
"""

from __future__ import annotations

from collections.abc import Callable

from m2flow.training.optimizer import NotFinite

SKIPPED = "skipped_share"
"""The figure: 1 of a step that was left out, else 0; its mean is the share of steps."""


class Skips:
    """Counts steps that were left out one after the other.

    Args:
        most: how many may be; one more ends the run.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._in_a_row = 0

    def figures(self, step: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Take a step; its figures with `skipped_share`, which is the only one of a skipped step.

        Raises:
            NotFinite: this one and `most` before it cannot be taken.
        """
        try:
            figures = step()
        except NotFinite as error:
            self._in_a_row += 1
            if self._in_a_row > self.most:
                times = f"{self._in_a_row} times in a row" if self.most else "at once"
                raise NotFinite(f"{error}; {times} (max_skipped_updates: {self.most})") from None
            return {SKIPPED: 1.0}
        self._in_a_row = 0
        return {**figures, SKIPPED: 0.0}
