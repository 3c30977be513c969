"""The account of lanes' time: which seconds went to which stage, to overhead, and to nothing.

The account is a partition. Within a window each moment of a lane counts once, so the seconds of
stages, switching, transfers, publishing, waiting and idleness add up to the window exactly, however
spans overlap. It serves simulated spans and measured ones alike; all spans given together must come
from one clock, in seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from m2flow.engine.spans import Span

Window = tuple[float, float]
"""Start and end, in seconds."""

WORK = ("call", "finish")
"""Kinds of spans that are work of a stage."""

TERM_OF = {"switch": "switching", "publish": "publishing", "transfer": "links", "wait": "waiting"}
"""The term that each of the other kinds counts for."""

TERMS = ("compute", "switching", "publishing", "links", "waiting")
"""The parts of a lane's time in the order in which they are shown; idleness is waiting."""

PRECEDENCE: Mapping[str, int] = {
    "call": 0,
    "finish": 0,
    "publish": 1,
    "switch": 2,
    "transfer": 3,
    "wait": 4,
}
"""Of several spans at one moment the one with the lowest number counts: work hides the rest."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a lane's time that counts for one span; pieces of a lane do not overlap.

    Attributes:
        kind, name: of the span.
        start, end: seconds.
    """

    kind: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def term(self) -> str:
        """The stage, or the term of `TERM_OF`."""
        return TERM_OF.get(self.kind, self.name)


@dataclass(frozen=True, slots=True)
class LaneTime:
    """Where the `seconds` of one lane went.

    Attributes:
        lane: its number.
        seconds: of the window.
        stages: seconds inside each stage.
        beside: seconds by the terms of `TERM_OF`.
    """

    lane: int
    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)
    beside: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(TERM_OF.values(), 0.0)
    )

    @property
    def idle(self) -> float:
        """Seconds of which no span tells."""
        return max(0.0, self.seconds - sum(self.stages.values()) - sum(self.beside.values()))

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by `TERMS`."""
        found = {"compute": sum(self.stages.values()), **self.beside}
        return found | {"waiting": found["waiting"] + self.idle}

    def share(self, seconds: float) -> float:
        """`seconds` as a share of the lane's window; 0 for an empty window."""
        return seconds / self.seconds if self.seconds > 0 else 0.0

    def __add__(self, other: LaneTime) -> LaneTime:
        """The account of two windows; the lane is the first one's."""
        stages = {
            name: self.stages.get(name, 0.0) + other.stages.get(name, 0.0)
            for name in dict.fromkeys((*self.stages, *other.stages))
        }
        beside = {name: seconds + other.beside[name] for name, seconds in self.beside.items()}
        return LaneTime(self.lane, self.seconds + other.seconds, stages, beside)


def where_the_time_went(
    spans: Iterable[Span], window: Window | None = None, lanes: Iterable[int] = ()
) -> list[LaneTime]:
    """The account of each lane, in order of lanes.

    Args:
        spans: any order.
        window: spans are cut to it; None: the extent of all spans.
        lanes: lanes that are listed even if they have no span.
    """
    grouped = by_lane(spans, lanes)
    if window is None:
        window = extent([span for own in grouped.values() for span in own])
    return [_account(lane, pieces(own, window), window) for lane, own in grouped.items()]


def by_lane(spans: Iterable[Span], lanes: Iterable[int] = ()) -> dict[int, list[Span]]:
    """The spans of each lane, in order of lanes; `lanes` are there even without a span."""
    grouped: dict[int, list[Span]] = {lane: [] for lane in lanes}
    for span in spans:
        grouped.setdefault(span.lane, []).append(span)
    return {lane: grouped[lane] for lane in sorted(grouped)}


def extent(spans: Sequence[Span]) -> Window:
    """First start and last end; (0, 0) for no spans."""
    if not spans:
        return 0.0, 0.0
    return min(span.start for span in spans), max(span.end for span in spans)


def pieces(spans: Iterable[Span], window: Window) -> list[Piece]:
    """One lane's window as pieces in order; the gaps between them are idle.

    A moment counts for the span that comes first in `PRECEDENCE`, among equals for the one that
    began last. A sweep over starts and ends with a heap of the spans that go on: O(n log n).
    """
    first, last = window
    cut = sorted(
        (max(span.start, first), min(span.end, last), number, span)
        for number, span in enumerate(spans)
        if span.end > first and span.start < last and span.end > span.start
    )
    moments = sorted({moment for start, end, *_ in cut for moment in (start, end)})
    running: list[tuple[int, float, int, float, Span]] = []
    found: list[Piece] = []
    upcoming = 0
    for left, right in pairwise(moments):
        while upcoming < len(cut) and cut[upcoming][0] <= left:
            _, end, number, span = cut[upcoming]
            heapq.heappush(running, (PRECEDENCE[span.kind], -span.start, number, end, span))
            upcoming += 1
        while running and running[0][3] <= left:
            heapq.heappop(running)
        if running:
            _append(found, Piece(running[0][4].kind, running[0][4].name, left, right))
    return found


def _append(found: list[Piece], piece: Piece) -> None:
    """Add a piece, joined to the last one where that is of the same work and ends there."""
    if found and (found[-1].kind, found[-1].name, found[-1].end) == (
        piece.kind,
        piece.name,
        piece.start,
    ):
        piece = Piece(piece.kind, piece.name, found.pop().start, piece.end)
    found.append(piece)


def _account(lane: int, own: Sequence[Piece], window: Window) -> LaneTime:
    stages: dict[str, float] = {}
    beside = dict.fromkeys(TERM_OF.values(), 0.0)
    for piece in own:
        spent = stages if piece.kind in WORK else beside
        spent[piece.term] = spent.get(piece.term, 0.0) + piece.seconds
    return LaneTime(lane, window[1] - window[0], stages, beside)
