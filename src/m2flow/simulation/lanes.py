"""`VirtualLanes`: when the lanes of a simulation are free, what they did, and what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from m2flow.engine.messages import CallCommand, LaneCommand, MoveState
from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span, SpanKind
from m2flow.flow.graph import StageNode
from m2flow.simulation.timing import Timing


@dataclass(slots=True)
class _Memory:
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


class VirtualLanes:
    """The lanes of a plan under a virtual clock.

    Args:
        plan: names the lanes, their limits and who stands on them.
        timing: how long things take.

    Attributes:
        spans: what the lanes did.
    """

    def __init__(self, plan: Plan, timing: Timing) -> None:
        self._plan, self._timing = plan, timing
        self.spans: list[Span] = []
        self._running: dict[int, int] = {}
        self._free_at = {lane.id: 0.0 for lane in plan.lanes}
        self._memory = {lane.id: _Memory() for lane in plan.lanes if lane.memory_bytes is not None}

    def peak_bytes(self) -> dict[int, int]:
        """For each lane with a limit, the most that its memory held."""
        return {lane: memory.peak() for lane, memory in self._memory.items()}

    def begin(self, lane: int, command: CallCommand, sent_at: float) -> float:
        """Give a lane a call; when the lane begins with it."""
        assert lane not in self._running, f"lane {lane} was given a call while it ran another"
        self._running[lane] = command.call
        return self._start_of(lane, command, sent_at)

    def end(self, lane: int, call: int) -> None:
        """A lane says that a call has ended."""
        assert self._running.pop(lane) == call

    def _start_of(self, lane: int, command: LaneCommand, sent_at: float) -> float:
        """When a lane comes to a command."""
        return max(sent_at + self._timing.dispatch(command), self._free_at[lane])

    def spend(
        self,
        lane: int,
        node: StageNode,
        kind: SpanKind,
        start: float,
        seconds: float,
        facts: Mapping[str, object],
    ) -> float:
        """Work on a stage, or on its `finish`, from a moment on; when that ends."""
        end = self.busy(Span(lane, node.name, kind, start, start + seconds, facts))
        if lane in self._memory:
            room = self._plan.placements[node.worker].working_bytes
            self._memory[lane].calls.append((start, end, room))
        return end

    def busy(self, span: Span) -> float:
        """A lane does what a span says; when that ends."""
        self._free_at[span.lane] = max(self._free_at[span.lane], span.end)
        self.spans.append(span)
        return span.end

    def move(self, command: MoveState, sent_at: float) -> None:
        """Offload or onload a worker, in turn with the lane's commands."""
        lane, worker = command.lane, command.worker
        start = self._start_of(lane, command, sent_at)
        end = start + self._timing.move(worker, command.what, lane)
        size = self._plan.placements[worker].state_bytes
        at, change = (start, size) if command.what == "onload" else (end, -size)
        self._memory[lane].changes.append((at, change))
        self.busy(Span(lane, worker, "switch", start, end, {"what": command.what}))
