"""`Auto`: what mode "auto" goes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec
from m2flow.flow.worker import Layout
from m2flow.plan.profile import Profile
from m2flow.runtime.driver.methods import STEP, Methods

if TYPE_CHECKING:
    from m2flow.runtime.driver.pilot import Pilot

GUESS = "collocated"
"""Mode of the first steps where nothing is known: it needs no knowledge, and it shows every stage
on every lane."""


def nowhere(_profile: Profile) -> None:
    """A profile that is learned is not stored."""


@dataclass(frozen=True)
class Auto:
    """What mode "auto" goes by.

    Attributes:
        profile: one that was stored or computed; without one the run begins with a guess, and
            learns a profile from its first steps.
        max_staleness: how many steps generation may run ahead of training; a budget.
        num_steps: of the whole run, by which trying a plan must pay; None if unknown.
        deadline_seconds: longest that a call may take, whatever the plan; None for the default.
        keep: called with each profile that the run learns, to store it.
    """

    profile: Profile | None = None
    max_staleness: int = 0
    num_steps: int | None = None
    deadline_seconds: float | None = None
    keep: Callable[[Profile], object] = nowhere

    def pilot(
        self, methods: Methods, lanes: Sequence[LaneSpec], layouts: Mapping[str, Layout]
    ) -> Pilot:
        """Return the pilot of a run on these lanes, with the plan to begin with."""
        from m2flow.runtime.driver.pilot import Pilot

        return Pilot(
            methods.graphs[STEP],
            lanes,
            methods.num_items[STEP],
            known=self.profile,
            max_staleness=self.max_staleness,
            isolated=methods.isolated,
            layouts=layouts,
            num_steps=self.num_steps,
            deadline_seconds=self.deadline_seconds,
            keep=self.keep,
        )


AUTO = Auto()
