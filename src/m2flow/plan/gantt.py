"""The layout of a Gantt chart: which lanes share a row, and which work fills it when.

Laid out once from spans, predicted or measured, and drawn as text (`m2flow.plan.explain.picture`)
or as SVG (`m2flow.observe.gantt`). A chart is plain data, which a JSON file can carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mode

from m2flow.engine.spans import Span, ids_text
from m2flow.simulation.time_account import Piece, Window, by_lane, extent, pieces

Work = tuple[str, str]
"""(kind, name) of a span: a stage's call or finish, or a switch, publish, transfer or wait."""

MAX_ROWS = 16
"""If more rows than these differ, lanes that run the same stages are one row."""


@dataclass(frozen=True)
class GanttRow:
    """Lanes that are drawn as one, by what most of them did.

    Attributes:
        lanes: their numbers.
        pieces: what they did, in order; the gaps are idle.
        idle: share of their time, in the mean.
    """

    lanes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    idle: float


@dataclass(frozen=True)
class Gantt:
    """Rows over the seconds from `start` to `end`."""

    start: float
    end: float
    rows: tuple[GanttRow, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start


def lay_out(
    spans: Sequence[Span], window: Window | None = None, lanes: Iterable[int] = ()
) -> Gantt:
    """A chart with a row for each lane.

    Args:
        spans: of one clock, in any order.
        window: seconds that the chart covers; None: the extent of the spans.
        lanes: lanes that are drawn even if they have no span.
    """
    window = extent(spans) if window is None else window
    rows, length = [], window[1] - window[0]
    for lane, own in by_lane(spans, lanes).items():
        found = tuple(pieces(own, window))
        idle = 1.0 - sum(piece.seconds for piece in found) / length if length > 0 else 0.0
        rows.append(GanttRow((lane,), found, max(0.0, idle)))
    return Gantt(*window, tuple(rows))


def folded(chart: Gantt, columns: int) -> Gantt:
    """The chart in so many columns of time, with one row for lanes that then look alike.

    Args:
        chart: with a row for each lane.
        columns: at least 1.
    """
    drawn = [tuple(in_columns(row.pieces, chart, columns)) for row in chart.rows]
    if len(set(drawn)) > MAX_ROWS:
        groups: dict[frozenset[Work], list[tuple[Work | None, ...]]] = {}
        for shown in drawn:
            groups.setdefault(_stages(shown), []).append(shown)
        # Each column shows what most of the rows show there.
        common = {key: tuple(map(mode, zip(*rows, strict=True))) for key, rows in groups.items()}
        drawn = [common[_stages(shown)] for shown in drawn]
    together: dict[tuple[Work | None, ...], list[GanttRow]] = {}
    for shown, row in zip(drawn, chart.rows, strict=True):
        together.setdefault(shown, []).append(row)
    rows = (
        GanttRow(
            tuple(lane for row in alike for lane in row.lanes),
            tuple(joined(shown, chart)),
            sum(row.idle for row in alike) / len(alike),
        )
        for shown, alike in together.items()
    )
    return Gantt(chart.start, chart.end, tuple(rows))


def in_columns(row: Sequence[Piece], chart: Gantt, columns: int) -> list[Work | None]:
    """The work that each column of a row shows; None where it is idle.

    What a column of several works holds but does not show is owed to the next such column (error
    diffusion), so each work covers its share of the row to within a column. Work too short for any
    column of its own is shown in the one that holds most of it.
    """
    length = chart.seconds / columns
    shown: list[Work | None] = [None] * columns
    mixed: dict[int, dict[Work | None, float]] = {}
    for piece in row if length > 0 else ():
        work = piece.kind, piece.name
        begin, end = (piece.start - chart.start) / length, (piece.end - chart.start) / length
        first, last = math.ceil(begin), min(math.floor(end), columns)
        shown[first:last] = [work] * (last - first)
        for number in {min(math.floor(begin), columns - 1), min(last, columns - 1)}:
            share = min(end, number + 1) - max(begin, number)
            if share > 0 and not first <= number < last:
                held = mixed.setdefault(number, {})
                held[work] = held.get(work, 0.0) + share
    owed: dict[Work | None, float] = {None: 0.0}
    for number in sorted(mixed):
        amounts = mixed[number]
        amounts[None] = 1.0 - sum(amounts.values())
        for one, amount in amounts.items():
            owed[one] = owed.get(one, 0.0) + amount
        best = max(owed, key=lambda one: owed[one])
        owed[best] -= 1.0
        shown[number] = best
    for short in sorted({one for amounts in mixed.values() for one in amounts if one} - {*shown}):
        number = max(mixed, key=lambda n: mixed[n].get(short, 0.0))
        if shown[number] is None or shown.count(shown[number]) > 1:
            shown[number] = short
    return shown


def joined(columns: Sequence[Work | None], chart: Gantt) -> list[Piece]:
    """Columns as pieces: neighbours of the same work are one, idle columns are left out."""
    each = chart.seconds / max(1, len(columns))
    found, begin = list[Piece](), 0
    for work, alike in groupby(columns):
        end = begin + len(list(alike))
        if work is not None:
            found.append(Piece(*work, chart.start + begin * each, chart.start + end * each))
        begin = end
    return found


def lane_names(lanes: Sequence[int]) -> str:
    """`lane 2`, `lanes 0-3, 8`."""
    return f"lane{'s' if len(lanes) > 1 else ''} {ids_text(sorted(lanes)).replace(',', ', ')}"


def _stages(row: Sequence[Work | None]) -> frozenset[Work]:
    """The stages that a row shows."""
    return frozenset(work for work in row if work and work[0] == "call")
