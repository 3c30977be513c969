"""`Watch`: measured against predicted, step by step; when a drift lasts; whether a new plan pays.

Lengths change while a policy learns, machines get busy, models are loaded from slower disks: a plan
that was the best one may not stay it. A drift lasts when each of the last steps was off to the same
side. The profile is then corrected by what each stage has really taken, and the planner asked
again. Going over to its plan must repay the pause within the steps that are left.
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
"""A step further off than this, relatively, has drifted."""

PATIENCE = 5
"""So many steps in a row make a drift that lasts."""

WARM_UP = 2
"""Steps under a new plan that do not count: kernels, caches and lanes come up to speed."""

LEAST_GAIN = 0.03
"""A new plan must be predicted to be faster by this share; less is within a prediction's error."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step has taken: its seconds, and the seconds of lanes that each stage took."""

    seconds: float
    stages: Mapping[str, float]


class Watch:
    """Watches the steps of one plan.

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
        """Take a step in."""
        if self._warm_up:
            self._warm_up -= 1
        else:
            self._last.append(measured)

    def drift(self) -> float | None:
        """Measured over predicted seconds, if all of the last steps were off to one side."""
        if len(self._last) < self.patience:
            return None
        predicted = float(self.candidate.prediction.seconds)
        ratios = [step.seconds / predicted for step in self._last]
        if min(ratios) > 1 + self.tolerance or max(ratios) < 1 - self.tolerance:
            return statistics.median(ratios)
        return None

    def corrected(self, profile: Profile) -> Profile:
        """The profile, each stage's seconds scaled by measured over predicted seconds of lanes."""
        predicted = self.candidate.prediction.stages
        stages = {}
        for name, stage in profile.stages.items():
            expected = float(predicted.get(name, 0.0))
            seen = [step.stages[name] for step in self._last if name in step.stages]
            ratio = statistics.median(seen) / expected if seen and expected > 0 else 1.0
            stages[name] = stage.times(ratio) if ratio > 0 else stage
        return replace(profile, stages=stages)


def pays(now: Seconds, then: Seconds, pause: Seconds, steps_left: int) -> bool:
    """Whether going over to a plan repays the pause within the steps that are left.

    Args:
        now, then: seconds of a step as it is, and under the other plan.
        pause: for which no step can run.
        steps_left: of the run.
    """
    gain = now - then
    return gain > LEAST_GAIN * now and gain * steps_left > pause
