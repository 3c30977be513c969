"""Optimizer steps that are left out because a loss or gradient is not finite, up to so many.

One bad batch does not end a run; weights or data that are broken give one after the other, and do.
The optimizer has left weights and state as they were, on every replica alike.
"""

from __future__ import annotations

from collections import Counter
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
        self._in_a_row = Counter[str]()
        self._why = ""

    def figures(self, step: Callable[[], dict[str, float]], of: str = "") -> dict[str, float]:
        """Take a step; its figures with `skipped_share`, which is the only one of a skipped step.

        Args:
            step: takes it.
            of: whose step it is; each is counted alone.

        Raises:
            NotFinite: this one and `most` before it cannot be taken.
        """
        try:
            figures = step()
        except NotFinite as error:
            self._why = self._why or str(error)
            self._in_a_row[of] += 1
            count = self._in_a_row[of]
            if count > self.most:
                times = f"{count} times in a row" if self.most else "at once"
                raise NotFinite(f"{error}; {times} (max_skipped_updates: {self.most})") from None
            return {SKIPPED: 1.0}
        self._in_a_row[of] = 0
        return {**figures, SKIPPED: 0.0}

    def take_note(self) -> str:
        """Why the first step was left out since this was last asked; "" where none was."""
        why, self._why = self._why, ""
        return why
