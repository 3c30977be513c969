"""`Auto`: what mode "auto" goes by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from m2flow.plan.profile import Profile
from m2flow.runtime.arguments import check_count, check_seconds

GUESSES = ("collocated", "disaggregated", "hybrid")
"""Modes of the first steps where nothing is known, one after the other until one can run. The first
needs no knowledge, and shows every stage on every lane."""

EFFORT = 40
"""Simulations for each staleness: lanes wait while plans are chosen."""


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

    Raises:
        UserError: a number is none, or out of bounds.
    """

    profile: Profile | None = None
    max_staleness: int = 0
    num_steps: int | None = None
    deadline_seconds: float | None = None
    keep: Callable[[Profile], object] = nowhere

    def __post_init__(self) -> None:
        check_count("auto.max_staleness", self.max_staleness, least=0)
        if self.num_steps is not None:
            check_count("auto.num_steps", self.num_steps)
        if self.deadline_seconds is not None:
            check_seconds("auto.deadline_seconds", self.deadline_seconds)


AUTO = Auto()
