"""How long a simulator may take, before it counts as hung."""

from __future__ import annotations

from dataclasses import dataclass

from m2flow.errors import UserError


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds after which a process that has not moved on is killed.

    They hold for one environment's step or reset, however many a call concerns: a process shows
    after each that it goes on.

    Attributes:
        start: to import the simulator and make the environments.
        reset: one attempt at a reset, building the simulator anew included.
        step: one step.
        render: a call that draws, saves or restores.
    """

    start: float = 600.0
    reset: float = 300.0
    step: float = 60.0
    render: float = 120.0

    def __post_init__(self) -> None:
        for name in ("start", "reset", "step", "render"):
            if getattr(self, name) <= 0:
                raise UserError(
                    "must be positive", key=f"deadlines.{name}", value=getattr(self, name)
                )
