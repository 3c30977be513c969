"""What lanes did and when: spans, and the account of where their time went.

Promises: the account is a partition. On each lane the seconds of stages, switching, transfers,
publishing, waiting and idleness add up to the window exactly, however spans overlap. Knows nothing
of clocks: all spans given together must come from one clock, in seconds.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

SpanKind = Literal["call", "switch", "transfer", "wait", "publish", "finish"]
Lane = int | str

PRECEDENCE: Mapping[str, int] = {
    "call": 0,
    "finish": 0,
    "publish": 1,
    "switch": 2,
    "transfer": 3,
    "wait": 4,
}
"""Which of several overlapping spans a moment counts for: the lowest. Work hides the rest."""


class SpanLike(Protocol):
    """What a span must offer; floors below bring their own class."""

    @property
    def lane(self) -> Lane: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def args(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a lane did from `start` to `end` (seconds of one clock).

    `name` is the stage for a call or a finish, the worker for a switch or a publish, and what is
    moved or awaited for a transfer or a wait.
    """

    lane: Lane
    name: str
    kind: SpanKind
    start: float
    end: float
    args: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaneTime:
    """Where the `seconds` of one lane went; all fields below are seconds and add up to it."""

    lane: Lane
    seconds: float
    stages: Mapping[str, float]
    switching: float = 0.0
    transfer: float = 0.0
    publishing: float = 0.0
    waiting: float = 0.0
    idle: float = 0.0

    @property
    def working(self) -> float:
        """Seconds inside stages."""
        return sum(self.stages.values())

    def share(self, seconds: float) -> float:
        """`seconds` as a share of the lane's window; 0 for an empty window."""
        return seconds / self.seconds if self.seconds > 0 else 0.0

    def __add__(self, other: LaneTime) -> LaneTime:
        assert self.lane == other.lane, "only times of one lane can be added"
        stages = dict(self.stages)
        for stage, seconds in other.stages.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
        return LaneTime(
            self.lane,
            self.seconds + other.seconds,
            stages,
            self.switching + other.switching,
            self.transfer + other.transfer,
            self.publishing + other.publishing,
            self.waiting + other.waiting,
            self.idle + other.idle,
        )


def where_the_time_went(
    spans: Iterable[SpanLike], window: tuple[float, float] | None = None
) -> list[LaneTime]:
    """The account of each lane, in the lanes' natural order.

    Overlapping spans of a lane are merged: a moment counts once, for the span that comes first in
    `PRECEDENCE`, and among equals for the one that began last (the inner one).

    Args:
        spans: any order.
        window: start and end in seconds; spans are clipped to it. None: the extent of all spans.
    """
    by_lane: dict[Lane, list[SpanLike]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    if window is None:
        every = [span for lane_spans in by_lane.values() for span in lane_spans]
        window = extent(every)
    return [_account(lane, by_lane[lane], window) for lane in sorted(by_lane, key=lane_order)]


def extent(spans: Sequence[SpanLike]) -> tuple[float, float]:
    """First start and last end, in seconds; (0, 0) for no spans."""
    if not spans:
        return 0.0, 0.0
    return min(span.start for span in spans), max(span.end for span in spans)


def lane_order(lane: Lane) -> tuple[int, list[tuple[int, int, str]]]:
    """Sorting key: numbered lanes first, then names with their numbers read as numbers."""
    if isinstance(lane, int):
        return 0, [(0, lane, "")]
    parts = re.findall(r"\d+|\D+", lane)
    return 1, [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _account(lane: Lane, spans: list[SpanLike], window: tuple[float, float]) -> LaneTime:
    seconds: dict[tuple[str, str], float] = {}
    for kind, name, start, end in covered(spans, window):
        seconds[kind, name] = seconds.get((kind, name), 0.0) + end - start
    stages: dict[str, float] = {}
    overhead = dict.fromkeys(("switch", "transfer", "publish", "wait"), 0.0)
    for (kind, name), amount in seconds.items():
        if kind in overhead:
            overhead[kind] += amount
        else:
            stages[name] = stages.get(name, 0.0) + amount
    length = window[1] - window[0]
    return LaneTime(
        lane,
        length,
        stages,
        switching=overhead["switch"],
        transfer=overhead["transfer"],
        publishing=overhead["publish"],
        waiting=overhead["wait"],
        idle=max(0.0, length - sum(seconds.values())),
    )


def covered(
    spans: Sequence[SpanLike], window: tuple[float, float]
) -> list[tuple[str, str, float, float]]:
    """One lane's window as disjoint (kind, name, start, end) in order; gaps are idle.

    A sweep over the starts and ends with a heap of what is running: O(n log n).
    """
    first, last = window
    pieces = sorted(
        (max(span.start, first), min(span.end, last), index)
        for index, span in enumerate(spans)
        if span.end > first and span.start < last and span.end > span.start
    )
    moments = sorted({moment for start, end, _ in pieces for moment in (start, end)})
    running: list[tuple[int, float, int, float]] = []
    result: list[tuple[str, str, float, float]] = []
    upcoming = 0
    for left, right in pairwise(moments):
        while upcoming < len(pieces) and pieces[upcoming][0] <= left:
            _, end, index = pieces[upcoming]
            span = spans[index]
            heapq.heappush(running, (PRECEDENCE[span.kind], -span.start, index, end))
            upcoming += 1
        while running and running[0][3] <= left:
            heapq.heappop(running)
        if running:
            top = spans[running[0][2]]
            result.append((top.kind, top.name, left, right))
    return result
