"""What a simulation gives, and the book of a virtual lane's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from m2flow.engine.spans import Span


@dataclass(slots=True)
class SimulatedRun:
    """What a simulation gives.

    Attributes:
        step_starts: virtual second at which each step was submitted.
        step_ends: virtual second at which each step was complete.
        spans: what each lane did.
        worked_on: (stage, step, item) to how often it was worked on.
        peak_items: for each stage, the most output items that were made or in the making and not
            released, over all steps.
        staleness: version lag to items.
        num_events: events the engine has handled.
        peak_bytes: for each lane with a memory limit, the most that resident states (from the start
            of an onload to the end of an offload) and the call at hand took together.
    """

    step_starts: dict[int, float] = field(default_factory=dict)
    step_ends: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    worked_on: dict[tuple[int, int, int], int] = field(default_factory=dict)
    peak_items: dict[int, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    num_events: int = 0
    peak_bytes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class LaneMemory:
    """What a lane's memory is taken by: resident states by their changes, and calls."""

    changes: list[tuple[float, int]] = field(default_factory=list)
    calls: list[tuple[float, float, int]] = field(default_factory=list)

    def peak(self) -> int:
        """The most at any moment; what goes at a moment goes before what comes."""
        changes = list(self.changes)
        for start, end, room in self.calls:
            if start < end:
                changes += [(start, room), (end, -room)]
        return max(accumulate((change for _, change in sorted(changes)), initial=0))
