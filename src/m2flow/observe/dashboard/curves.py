"""Figures of runs over steps, made small enough to draw: the mean of neighbours and their spread.

Promises: at most `points` values a curve, over any range of steps; all runs share one axis of
steps, so that a chart can show them beside each other; a step without a figure leaves a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from m2flow.observe.dashboard.following import numbers
from m2flow.observe.record import ACCURACY, EVALUATION, LOSS

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


class Curve(TypedDict):
    """One run's line in a chart; lists are as long as the axis. No spread: `low` is empty."""

    run: int
    mean: list[float | None]
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
            curves=[_curve(run, groups, width) for run, groups in gathered[key].items()],
        )
        for key in sorted(gathered, key=lambda key: (order.get(key, len(order)), key))
    ]
    axis = [min(low + (place + 1) * width - 1, high) for place in range(length)]
    return Curves(x=axis, charts=charts, first=first, last=last)


def _curve(run: int, groups: Sequence[Sequence[float]], width: int) -> Curve:
    spread = groups if width > 1 else ()
    return Curve(
        run=run,
        mean=[_short(sum(group) / len(group)) if group else None for group in groups],
        low=[_short(min(group)) if group else None for group in spread],
        high=[_short(max(group)) if group else None for group in spread],
    )


def _short(value: float) -> float:
    """Six digits: more than any screen shows."""
    return float(f"{value:.6g}")
