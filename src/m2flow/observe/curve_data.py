"""Figures of runs over steps, made small enough to draw: values, trend and spread.

Promises: at most `points` values a curve, over any range of steps; all runs share one axis of
steps, so that a chart can show them beside each other. Where a curve has values enough, its trend
is the running mean over neighbouring steps, and its band reaches from their 10th to their 90th
percentile; near an end both take fewer neighbours, as many on each side, so that a rise stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypedDict

from m2flow.observe.record import ACCURACY, EVALUATION, LOSS, as_number

LEADING = (
    "reward/mean",
    *EVALUATION,
    *ACCURACY,
    *LOSS,
    "train/loss",
    "throughput/tokens_per_s",
    "throughput/steps_per_s",
    "length/mean",
    "seconds/step",
)
"""The figures that stand at the top, in this order; all others follow by name."""

TREND_FROM, NEIGHBOURS, SAMPLED = 24, 28, 50
"""From so many values on a curve has a trend and a band; each side of a place takes this part of
them; a percentile is taken from so many values at most, evenly spread over the neighbours."""


class Curve(TypedDict):
    """One run's line in a chart; lists are as long as the axis, None where there is no value.

    `mean` is that of the steps at each place. `trend`, `low` and `high` are empty where there are
    too few values for them.
    """

    run: int
    mean: list[float | None]
    trend: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Chart(TypedDict):
    """A figure of all runs that have it."""

    key: str
    leading: bool
    curves: list[Curve]


class Curves(TypedDict):
    """The charts over one axis of steps, and the range that all runs span."""

    x: list[int]
    charts: list[Chart]
    first: int
    last: int


def curves_of(
    runs: Sequence[Mapping[int, Mapping[str, Any]]],
    points: int,
    low: int | None = None,
    high: int | None = None,
) -> Curves:
    """The charts of some runs.

    Args:
        runs: of each run, step to its figures, in order.
        points: the most values of a curve.
        low, high: the steps to show, both included; None for all.
    """
    steps = [step for rows in runs for step in (next(iter(rows), None), max(rows, default=None))]
    known = [step for step in steps if step is not None]
    first, last = min(known, default=0), max(known, default=0)
    low, high = first if low is None else low, last if high is None else high
    width = max(1, -(-(high - low + 1) // max(1, points)))
    length = max(0, -(-(high - low + 1) // width)) if known else 0
    gathered: dict[str, dict[int, list[list[float]]]] = {}
    for run, rows in enumerate(runs):
        for step, row in rows.items():
            if not low <= step <= high:
                continue
            place = (step - low) // width
            for key, value in numbers(row):
                lines = gathered.setdefault(key, {})
                if run not in lines:
                    lines[run] = [[] for _ in range(length)]
                lines[run][place].append(value)
    order = {key: place for place, key in enumerate(LEADING)}
    charts = [
        Chart(
            key=key,
            leading=key in order,
            curves=[_curve(run, groups) for run, groups in gathered[key].items()],
        )
        for key in sorted(gathered, key=lambda key: (order.get(key, len(order)), key))
    ]
    axis = [min(low + (place + 1) * width - 1, high) for place in range(length)]
    return Curves(x=axis, charts=charts, first=first, last=last)


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite figures of a row but its step and time."""
    for key, value in row.items():
        number = as_number(value)
        if number is not None and key not in ("step", "time"):
            yield key, number


def _curve(run: int, groups: Sequence[Sequence[float]]) -> Curve:
    """The curve of one run.

    Args:
        groups: for each place of the axis the values of its steps.
    """
    mean = [_short(sum(group) / len(group)) if group else None for group in groups]
    curve = Curve(run=run, mean=mean, trend=[], low=[], high=[])
    filled = [place for place, group in enumerate(groups) if group]
    if len(filled) < TREND_FROM:
        return curve
    values = [value for group in groups for value in group]
    starts = [0, *accumulate(len(groups[place]) for place in filled)]
    sums = [0.0, *accumulate(values)]
    empty: list[float | None] = [None] * len(groups)
    curve["trend"], curve["low"], curve["high"] = empty[:], empty[:], empty[:]
    reach, last = max(2, len(filled) // NEIGHBOURS), len(filled) - 1
    for number, place in enumerate(filled):
        near = min(reach, number, last - number)
        begin, end = starts[number - near], starts[number + near + 1]
        some = sorted(values[begin : end : -(-(end - begin) // SAMPLED)])
        curve["trend"][place] = _short((sums[end] - sums[begin]) / (end - begin))
        curve["low"][place] = _short(some[round(0.1 * (len(some) - 1))])
        curve["high"][place] = _short(some[round(0.9 * (len(some) - 1))])
    return curve


def _short(value: float) -> float:
    """Six digits: more than any screen shows."""
    return float(f"{value:.6g}")
