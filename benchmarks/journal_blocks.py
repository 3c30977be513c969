"""`m2flow` of which, in every other block of steps, no rollouts are kept; for `journal.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blocks import has_it

from m2flow.cli.app import main
from m2flow.runtime.driver.carrier import RayCarrier
from m2flow.runtime.driver.methods import STEP
from m2flow.runtime.lane.orders import KeepRollouts

NO_FLOW = "none"
"""A lane that keeps its rollouts keeps nothing."""


def _take_turns() -> None:
    submit = RayCarrier.submit

    def submit_step(self: RayCarrier, flow: str, step: int, *more: Any) -> None:
        """Lanes hear it before the first of the step's calls."""
        wanted = STEP if has_it(step) else NO_FLOW
        if flow == STEP and self._keeping is not None and self._keeping.place.flow != wanted:
            self._keeping = KeepRollouts(replace(self._keeping.place, flow=wanted))
            for lane in self.pool.lanes:
                self.greet(lane.id)
        submit(self, flow, step, *more)

    RayCarrier.submit = submit_step  # type: ignore[method-assign]


if __name__ == "__main__":
    _take_turns()
    main()
