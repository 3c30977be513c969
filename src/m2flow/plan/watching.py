"""`Watch`: compares measured steps with the prediction, and finds drifts that last.

The best plan does not stay the best: answers grow while a policy learns, machines get busy. A drift
lasts when each of the last steps was off to the same side. The profile is then corrected by those
steps, and the planner chooses again. Going over to another plan must repay the pause within the
steps that are left.
"""

from __future__ import annotations

import statistics
from collections import deque

from m2flow.plan.units import Seconds

TOLERANCE = 0.15
"""Relative difference from which on a step has drifted."""

PATIENCE = 5
"""Number of drifted steps in a row that make a drift that lasts."""

LEAST_GAIN = 0.03
"""Share of a step that a new plan must gain; less is within the error of a prediction."""


class Watch:
    """Compares the steps of one plan with its prediction.

    Args:
        predicted: seconds that a step is expected to take.
    """

    def __init__(self, predicted: Seconds) -> None:
        self.predicted = predicted
        self._last: deque[float] = deque(maxlen=PATIENCE)

    def note(self, seconds: float) -> None:
        """Add what a step has taken."""
        self._last.append(seconds)

    def drift(self) -> float | None:
        """Return measured over predicted seconds if all of the last steps were off to one side."""
        if len(self._last) < PATIENCE:
            return None
        ratios = [seconds / self.predicted for seconds in self._last]
        if min(ratios) > 1 + TOLERANCE or max(ratios) < 1 - TOLERANCE:
            return statistics.median(ratios)
        return None


def pays(now: Seconds, then: Seconds, pause: Seconds, steps_left: int) -> bool:
    """Return whether going over to a plan repays the pause within the steps that are left.

    Args:
        now, then: seconds of a step now, and under the other plan.
        pause: seconds in which no step can run.
        steps_left: steps that the run still has.
    """
    gain = now - then
    return gain > LEAST_GAIN * now and gain * steps_left > pause
