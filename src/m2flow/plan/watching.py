"""`Watch`: compares measured steps with the prediction, and finds drifts that last.

The best plan does not stay the best: answers grow while a policy learns, machines get busy. A drift
lasts when each of the last steps was off to the same side. The profile is then corrected by what
each stage has taken, and the planner chooses again. Going over to another plan must repay the pause
within the steps that are left.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from m2flow.plan.prediction import Candidate
from m2flow.plan.profile import Profile
from m2flow.plan.units import Seconds

TOLERANCE = 0.15
"""Relative difference from which on a step has drifted."""

PATIENCE = 5
"""Number of drifted steps in a row that make a drift that lasts."""

WARM_UP = 2
"""Number of first steps under a plan that do not count, while kernels and caches warm up."""

LEAST_GAIN = 0.03
"""Share of a step that a new plan must gain; less is within the error of a prediction."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds of a step, and the seconds of lanes that each stage took in it."""

    seconds: float
    stages: Mapping[str, float]


class Watch:
    """Compares the steps of one plan with its prediction.

    Args:
        candidate: the plan and its prediction.
        tolerance, patience, warm_up: see TOLERANCE, PATIENCE and WARM_UP.
    """

    def __init__(
        self,
        candidate: Candidate,
        tolerance: float = TOLERANCE,
        patience: int = PATIENCE,
        warm_up: int = WARM_UP,
    ) -> None:
        self.candidate, self.tolerance, self.patience = candidate, tolerance, patience
        self._warm_up = warm_up
        self._last: deque[Measured] = deque(maxlen=patience)

    def note(self, measured: Measured) -> None:
        """Add a step."""
        if self._warm_up:
            self._warm_up -= 1
        else:
            self._last.append(measured)

    def drift(self) -> float | None:
        """Return measured over predicted seconds if all of the last steps were off to one side."""
        if len(self._last) < self.patience:
            return None
        predicted = float(self.candidate.prediction.seconds)
        ratios = [step.seconds / predicted for step in self._last]
        if min(ratios) > 1 + self.tolerance or max(ratios) < 1 - self.tolerance:
            return statistics.median(ratios)
        return None

    def corrected(self, profile: Profile) -> Profile:
        """Scale the seconds of each stage by measured over predicted seconds of lanes."""
        predicted = self.candidate.prediction.stages
        stages = {}
        for name, stage in profile.stages.items():
            expected = float(predicted.get(name, 0.0))
            seen = [step.stages[name] for step in self._last if name in step.stages]
            ratio = statistics.median(seen) / expected if seen and expected > 0 else 1.0
            stages[name] = stage.times(ratio) if ratio > 0 else stage
        return replace(profile, stages=stages)


def pays(now: Seconds, then: Seconds, pause: Seconds, steps_left: int) -> bool:
    """Return whether going over to a plan repays the pause within the steps that are left.

    Args:
        now, then: seconds of a step now, and under the other plan.
        pause: seconds in which no step can run.
        steps_left: steps that the run still has.
    """
    gain = now - then
    return gain > LEAST_GAIN * now and gain * steps_left > pause
