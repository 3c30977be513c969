"""Records what every lane did, in bounded memory, at a few microseconds a span.

Promises: the spans of the first and of the last few steps are kept whole, for a trace and a
picture; the account of where the time went covers every step, because each step is summed up when
it ends. A step of more than `max_spans_per_step` spans keeps its first ones and says how many it
dropped. Knows no clock: spans arrive with their times.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from m2flow.engine.spans import Span
from m2flow.observe.trace import StepSpans, Trace, write_trace
from m2flow.plan.time_account import LaneTime, extent, where_the_time_went


class Timeline:
    """Takes spans as they end, and closes them into steps.

    `add` may be called from any thread; `end_step` and `write` from one.

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
        self._current: list[Span] = []
        self._dropped = 0
        self._first: list[StepSpans] = []
        self._last: deque[StepSpans] = deque(maxlen=keep_last)
        self._totals: dict[int, LaneTime] = {}
        self._seconds = 0.0
        self._num_steps = 0

    def add(self, span: Span) -> None:
        """Keep a span for the step now running."""
        assert span.end >= span.start, f"a span ends before it starts: {span}"
        if len(self._current) < self._max_spans:
            self._current.append(span)
        else:
            self._dropped += 1

    def end_step(self, step: int, start: float | None = None, end: float | None = None) -> None:
        """Close the step: all spans added since the last one belong to it.

        Args:
            step: its number.
            start: when the step began, in the spans' clock; None means with its first span.
            end: when it ended; None means with its last span.
        """
        spans, self._current = self._current, []
        dropped, self._dropped = self._dropped, 0
        first, last = extent(spans)
        start = first if start is None else start
        end = max(last, start) if end is None else end
        for lane_time in where_the_time_went(spans, (start, end)):
            known = self._totals.get(lane_time.lane)
            self._totals[lane_time.lane] = lane_time if known is None else known + lane_time
        self._seconds += end - start
        self._num_steps += 1
        kept = StepSpans(step, start, end, spans, dropped)
        (self._first if len(self._first) < self._keep_first else self._last).append(kept)

    @property
    def steps(self) -> list[StepSpans]:
        """The steps whose spans are kept, oldest first."""
        return [*self._first, *self._last]

    def totals(self) -> list[LaneTime]:
        """The account of each lane over all steps; a lane is idle in a step without it."""
        totals = []
        for lane in sorted(self._totals):
            absent = max(0.0, self._seconds - self._totals[lane].seconds)
            totals.append(self._totals[lane] + LaneTime(lane, absent, idle=absent))
        return totals

    def trace(self) -> Trace:
        """All that is known by now."""
        return Trace(self.steps, self.totals(), self._num_steps)

    def write(self, path: Path | str) -> None:
        """Write `timeline.json`; may be called at any time and as often as wanted."""
        write_trace(path, self.trace())
