"""`Call`: a call in progress, as the engine knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from m2flow.engine.messages import ExportWeights, InstallWeights, RunCall, RunFinish

CallCommand: TypeAlias = RunCall | RunFinish | ExportWeights | InstallWeights


@dataclass(slots=True)
class Call:
    """A call in progress.

    Attributes:
        running: lanes that have not finished their part.
        heard: when it was started or last gave, or was given, items, in seconds of the engine's
            clock.
        units: units of a stage leased to it (what a streaming call was started with).
        unfinished: for a streaming call, unit to the number of output items still to come.
    """

    command: CallCommand
    running: set[int]
    heard: float
    step: int
    units: list[int] = field(default_factory=list)
    unfinished: dict[int, int] = field(default_factory=dict)
