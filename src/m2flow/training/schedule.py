"""Learning rate as a pure function of the number of optimizer steps taken.

No state: resuming needs the step counter and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then constant, or linear or cosine decay to a fraction of the peak.

    Attributes:
        decay: the shape after the warm-up.
        warmup_steps: steps over which the rate rises linearly; the first is peak / warmup_steps.
        total_steps: the step, counted from 0, at which decay has reached its end. Needed unless
            constant.
        final_fraction: of the peak, from `total_steps` on.
        idle_steps: so many steps at the start have the rate 0; warm-up and decay follow them.
    """

    decay: Decay = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final_fraction: float = 0.0
    idle_steps: int = 0

    def __post_init__(self) -> None:
        ends = self.total_steps is not None and self.total_steps > self._decay_begins
        assert self.decay == "constant" or ends, f"{self} must know where it ends"

    @property
    def _decay_begins(self) -> int:
        return self.idle_steps + self.warmup_steps

    def factor(self, step: int) -> float:
        """What the peak rate is multiplied by at the given step, counted from 0."""
        if step < self.idle_steps:
            return 0.0
        risen = min(1.0, (step - self.idle_steps + 1) / max(1, self.warmup_steps))
        return risen * self._remaining(step)

    def _remaining(self, step: int) -> float:
        """What decay has left of the peak at a step."""
        begins = self._decay_begins
        if self.decay == "constant" or step < begins:
            return 1.0
        assert self.total_steps is not None
        progress = min(1.0, (step - begins) / (self.total_steps - begins))
        match self.decay:
            case "linear":
                remaining = 1.0 - progress
            case "cosine":
                remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
            case _:
                assert_never(self.decay)
        return self.final_fraction + (1.0 - self.final_fraction) * remaining
