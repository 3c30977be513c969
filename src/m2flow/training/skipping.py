"""Optimizer steps that are left out because a loss or gradient is not finite, up to so many.

One bad batch does not end a run, in however many epochs its step goes through it; weights or data
that are broken give one after the other, and do. The optimizer has left weights and state as they
were, on every replica alike. A run ends after the step with the last of them, so that the step's
rollouts can be kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from m2flow.training.optimizer import NotFinite

SKIPPED = "skipped_share"
"""The figure: 1 of a step that was left out, else 0; its mean is the share of steps."""

_ENDS = " (max_skipped_updates: "
"""These words in a note end the run, and tell people which key of the recipe says so."""


def too_many(notes: Iterable[str]) -> str:
    """Which of a step's notes says that too many steps were left out; "" where none does."""
    return next((note for note in notes if _ENDS in note), "")


class Skips:
    """Counts steps that were left out one after the other.

    Args:
        most: how many may be; of one more the note is one that `too_many` finds.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._in_a_row = Counter[str]()
        self._why = ""

    def figures(
        self, step: Callable[[], dict[str, float]], of: str = "", *, again: bool = False
    ) -> dict[str, float]:
        """Take a step; its figures with `skipped_share`, which is the only one of a skipped step.

        Args:
            step: takes it.
            of: whose step it is; each is counted alone.
            again: whether one on the same data was left out before; a further one is not counted.
        """
        try:
            figures = step()
        except NotFinite as error:
            if again:
                return {SKIPPED: 1.0}
            self._why = self._why or str(error)
            self._in_a_row[of] += 1
            count = self._in_a_row[of]
            if count == self.most + 1:
                times = f"{count} times in a row" if self.most else "at once"
                self._why = f"{error}; {times}{_ENDS}{self.most})"
            return {SKIPPED: 1.0}
        self._in_a_row[of] = 0
        return {**figures, SKIPPED: 0.0}

    def take_note(self) -> str:
        """Why the first step was left out since this was last asked, or else the one that is one
        too many; "" where none was."""
        why, self._why = self._why, ""
        return why
