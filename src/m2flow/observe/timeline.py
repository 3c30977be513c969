"""Records what every lane did, in bounded memory.

Promises: the spans of the first and of the last few steps are kept whole, for a trace and a
picture; the account of where the time went covers every step, because each step is summed up when
it ends. A step of more than `max_spans_per_step` spans keeps its first ones and says how many it
dropped. Knows no clock: spans arrive with their times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from m2flow.engine.spans import Span
from m2flow.observe.trace import StepSpans, Trace, write_trace
from m2flow.simulation.time_account import LaneTime, where_the_time_went


class Timeline:
    """Takes the spans of one step after the other.

    Args:
        keep_first: steps whose spans are kept from the start of the run.
        keep_last: steps whose spans are kept from its end.
        max_spans_per_step: spans kept of one step.
    """

    def __init__(
        self, *, keep_first: int = 2, keep_last: int = 4, max_spans_per_step: int = 10_000
    ) -> None:
        self._keep_first = keep_first
        self._max_spans = max_spans_per_step
        self._first: list[StepSpans] = []
        self._last: deque[StepSpans] = deque(maxlen=keep_last)
        self._totals: dict[int, LaneTime] = {}
        self._seconds = 0.0
        self._num_steps = 0

    def add(self, step: int, spans: Sequence[Span], start: float, end: float) -> None:
        """Take the spans of a step.

        Args:
            step: its number.
            spans: what the lanes did, in the order in which it ended.
            start, end: when the step began and ended, in the spans' clock.
        """
        kept = spans[: self._max_spans]
        for lane_time in where_the_time_went(kept, (start, end)):
            known = self._totals.get(lane_time.lane)
            self._totals[lane_time.lane] = lane_time if known is None else known + lane_time
        self._seconds += end - start
        self._num_steps += 1
        those = StepSpans(step, start, end, kept, len(spans) - len(kept))
        (self._first if len(self._first) < self._keep_first else self._last).append(those)

    @property
    def steps(self) -> list[StepSpans]:
        """The steps whose spans are kept, oldest first."""
        return [*self._first, *self._last]

    def totals(self) -> list[LaneTime]:
        """The account of each lane over all steps; a lane is idle in a step without it."""
        totals = []
        for lane in sorted(self._totals):
            absent = max(0.0, self._seconds - self._totals[lane].seconds)
            totals.append(self._totals[lane] + LaneTime(lane, absent))
        return totals

    def trace(self) -> Trace:
        """All that is known by now."""
        return Trace(self.steps, self.totals(), self._num_steps)

    def write(self, path: Path | str) -> None:
        """Write `timeline.json`; may be called at any time and as often as wanted."""
        write_trace(path, self.trace())
