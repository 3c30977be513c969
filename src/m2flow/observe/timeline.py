"""Records what every lane did, in bounded memory.

Promises: the spans of the first and of the last few steps are kept whole, for a trace and a
picture; the account of where the time went covers every step, because each step is summed up when
it ends, by all of its spans; what of a call lies in earlier steps than the one in which it ended
counts in those. A step of more than `max_spans_per_step` spans keeps its first ones and says how
many it dropped. Knows no clock: spans arrive with their times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from m2flow.engine.spans import Span
from m2flow.observe.trace import StepSpans, Trace, write_trace
from m2flow.simulation.time_account import LaneTime, Window, where_the_time_went

NUM_OPEN = 4
"""Steps whose account is open: spans that arrive with a later step may lie in their windows."""


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
        self._totals: list[LaneTime] = []  # of the steps before those that are open
        self._open: deque[tuple[Window, Sequence[Span]]] = deque()
        self._seconds = 0.0
        self._num_steps = 0

    def add(self, step: int, spans: Sequence[Span], start: float, end: float) -> None:
        """Take the spans of a step.

        Args:
            step: its number.
            spans: what the lanes did, in the order in which it ended.
            start, end: when the step began and ended, in the spans' clock.
        """
        self._open.append(((start, end), spans))
        if len(self._open) > NUM_OPEN:
            self._totals = _joined([*self._totals, *self._account(self._open[0][0])])
            self._open.popleft()
        self._seconds += end - start
        self._num_steps += 1
        kept = spans[: self._max_spans]
        those = StepSpans(step, start, end, kept, len(spans) - len(kept))
        (self._first if len(self._first) < self._keep_first else self._last).append(those)

    @property
    def steps(self) -> list[StepSpans]:
        """The steps whose spans are kept, oldest first."""
        return [*self._first, *self._last]

    def totals(self) -> list[LaneTime]:
        """The account of each lane over all steps; a lane is idle in a step without it."""
        open_ones = [time for window, _ in self._open for time in self._account(window)]
        return [
            time + LaneTime(time.lane, max(0.0, self._seconds - time.seconds))
            for time in _joined([*self._totals, *open_ones])
        ]

    def _account(self, window: Window) -> list[LaneTime]:
        """The account of the window of an open step, by what has arrived with it and since."""
        return where_the_time_went((span for _, some in self._open for span in some), window)

    def trace(self) -> Trace:
        """All that is known by now."""
        return Trace(self.steps, self.totals(), self._num_steps)

    def write(self, path: Path | str) -> None:
        """Write `timeline.json`; may be called at any time and as often as wanted."""
        write_trace(path, self.trace())


def _joined(times: Sequence[LaneTime]) -> list[LaneTime]:
    """The account of each lane over all of its windows, in order of lanes."""
    found: dict[int, LaneTime] = {}
    for time in times:
        found[time.lane] = found[time.lane] + time if time.lane in found else time
    return [found[lane] for lane in sorted(found)]
