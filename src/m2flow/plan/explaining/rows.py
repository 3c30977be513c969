"""The lanes of a predicted step as rows of a picture: what each did most in each column of time.

Lanes whose rows are alike are one row; where too many differ (lengths are drawn, so they do), those
that hold the same workers are, and it shows what most of them do. How a row is drawn is not known
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.plan.prediction import Prediction

Work = tuple[str, str]
"""(kind, name) of a span: a stage's call or finish, or a switch, publish, transfer or wait."""

MAX_ROWS = 16
"""More rows than these are folded by the workers that the lanes hold."""


@dataclass(frozen=True)
class Piece:
    """A stretch of one row, in seconds from the start of the step."""

    kind: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Row:
    """Lanes that are shown as one.

    Attributes:
        lanes: their numbers.
        columns: what they did most in each column; None where they were idle.
        idle: share of their time, in the mean.
        alike: whether all of them did the same, column by column.
    """

    lanes: tuple[int, ...]
    columns: tuple[Work | None, ...]
    idle: float
    alike: bool = True

    def pieces(self, seconds: float) -> tuple[Piece, ...]:
        """Columns of one colour joined, over so many seconds; idle ones left out."""
        each = seconds / len(self.columns)
        found: list[Piece] = []
        for number, work in enumerate(self.columns):
            start, end = number * each, (number + 1) * each
            last = found[-1] if found else None
            if work is None:
                continue
            if last and (last.kind, last.name) == work and last.end > start - each / 2:
                found[-1] = Piece(*work, last.start, end)
            else:
                found.append(Piece(*work, start, end))
        return tuple(found)


def window(prediction: Prediction) -> float:
    """Seconds that a picture of the step covers."""
    return max([float(prediction.seconds), *(span.end for span in prediction.spans)])


def rows(prediction: Prediction, plan: Plan, columns: int) -> list[Row]:
    """The lanes of a plan in so many columns, folded.

    Args:
        prediction: of the plan, with the spans of a step.
        plan: whose lanes; those without a span are idle.
        columns: at least 1.
    """
    length = window(prediction) / columns
    spans: dict[int, list[Span]] = {lane.id: [] for lane in plan.lanes}
    for span in prediction.spans:
        spans.setdefault(span.lane, []).append(span)
    drawn = {lane: _columns(own, length, columns) for lane, own in spans.items()}
    folded = _folded(list(drawn), drawn, prediction.idle)
    if len(folded) <= MAX_ROWS:
        return folded
    held = {
        lane: tuple(sorted(name for name, spot in plan.placements.items() if lane in spot.lanes))
        for lane in drawn
    }
    common = {workers: _most(held, workers, drawn, columns) for workers in set(held.values())}
    shown = {lane: common[held[lane]] for lane in drawn}
    return _folded(list(drawn), shown, prediction.idle, drawn)


def _columns(spans: Sequence[Span], length: float, columns: int) -> tuple[Work | None, ...]:
    """What covers most of each column; nothing that happened at all is left out."""
    cover: list[dict[Work, float]] = [{} for _ in range(columns)]
    for work, start, end in merged(spans):
        first, last = int(start / length), min(int(end / length), columns - 1)
        for number in range(first, last + 1):
            amount = min(end, (number + 1) * length) - max(start, number * length)
            if amount > 0:
                cover[number][work] = cover[number].get(work, 0.0) + amount
    shown: list[Work | None] = []
    for amounts in cover:
        most = max(amounts, key=lambda work: amounts[work], default=None)
        idle = length - sum(amounts.values())
        shown.append(most if most is not None and amounts[most] > idle else None)
    for work in dict.fromkeys(work for amounts in cover for work in amounts):
        if work not in shown:
            best = max(range(columns), key=lambda n: cover[n].get(work, 0.0))
            if shown[best] is None or shown.count(shown[best]) > 1:
                shown[best] = work
    return tuple(shown)


def merged(spans: Sequence[Span]) -> list[tuple[Work, float, float]]:
    """Spans of one lane, those of the same work that overlap joined."""
    found: list[tuple[Work, float, float]] = []
    for span in sorted(spans, key=lambda span: (span.kind, span.name, span.start)):
        work: Work = (span.kind, span.name)
        if found and found[-1][0] == work and span.start <= found[-1][2]:
            found[-1] = (work, found[-1][1], max(found[-1][2], span.end))
        else:
            found.append((work, span.start, span.end))
    return found


def _most(
    held: Mapping[int, tuple[str, ...]],
    workers: tuple[str, ...],
    drawn: Mapping[int, tuple[Work | None, ...]],
    columns: int,
) -> tuple[Work | None, ...]:
    """For each column what most lanes that hold these workers do."""
    own = [drawn[lane] for lane in drawn if held[lane] == workers]
    return tuple(Counter(row[n] for row in own).most_common(1)[0][0] for n in range(columns))


def _folded(
    lanes: Sequence[int],
    shown: Mapping[int, tuple[Work | None, ...]],
    idle: Mapping[int, float],
    drawn: Mapping[int, tuple[Work | None, ...]] | None = None,
) -> list[Row]:
    same: dict[tuple[Work | None, ...], list[int]] = {}
    for lane in lanes:
        same.setdefault(shown[lane], []).append(lane)
    return [
        Row(
            tuple(sorted(members)),
            columns,
            sum(idle.get(lane, 1.0) for lane in members) / len(members),
            drawn is None or len({drawn[lane] for lane in members}) == 1,
        )
        for columns, members in same.items()
    ]


def lane_names(lanes: Sequence[int]) -> str:
    """`lane 2`, `lanes 0-3, 8`."""
    runs: list[list[int]] = []
    for lane in sorted(lanes):
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    names = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"lane{'s' if len(lanes) > 1 else ''} {names}"
