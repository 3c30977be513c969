"""What a simulation gives, and the counts of items that it keeps on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from m2flow.engine.spans import Span
from m2flow.flow.graph import SOURCE, StageNode


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


class ItemCounts:
    """How many items of each stage there are at a time.

    Args:
        record: learns how often items are worked on, and the most that there are of each stage.
    """

    def __init__(self, record: SimulatedRun) -> None:
        self._record = record
        self._held: dict[tuple[int, int], int] = {}  # (step, stage) to items

    def work_on(self, node: StageNode, step: int, items: Sequence[int]) -> None:
        """A call has begun that makes outputs of these: they count from now on."""
        worked_on = self._record.worked_on
        for item in items:
            key = (node.index, step, item)
            worked_on[key] = worked_on.get(key, 0) + 1
        if node.loop is None:
            here = (step, node.index)
            self._held[here] = self._held.get(here, 0) + len(items) * node.expands
            held = sum(n for (_, index), n in self._held.items() if index == node.index)
            peak = self._record.peak_items.get(node.index, 0)
            self._record.peak_items[node.index] = max(peak, held)

    def release(self, step: int, producer: int, num_items: int) -> None:
        """Nobody will read so many items."""
        if producer != SOURCE and (step, producer) in self._held:
            self._held[step, producer] -= num_items

    def forget(self, step: int) -> None:
        """A step is complete: what is left of it goes."""
        for key in [key for key in self._held if key[0] == step]:
            del self._held[key]
