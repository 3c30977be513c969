"""Line charts as inline SVG: axes with round ticks, a smoothed line, values under the pointer.

Promises: plain text in, markup out, everything escaped; no script. A value that is None leaves a
gap. However long the run, at most `MAX_POINTS` points of a line are drawn and `MAX_HITS` answer to
the pointer; each is the mean of its neighbours, whose spread is a band behind the line. Knows
nothing of runs; colours come from the variables of `theme`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from m2flow.observe.formatting import number
from m2flow.observe.theme import series_colour

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 24
MAX_POINTS, MAX_HITS = 220, 80
SMOOTH_FROM = 24
"""From so many points on, the line is smoothed and the measured values stand behind it, pale."""

CHART_CSS = """
.chart{display:block;width:100%;height:auto;overflow:visible}
.chart text{font-size:10.5px;fill:var(--faint);font-variant-numeric:tabular-nums}
.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .axis{stroke:var(--line);stroke-width:1}
.chart .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.chart .raw{stroke-width:1.25;opacity:.32}
.chart .band{opacity:.14}
.chart .dashed{stroke-dasharray:5 4;stroke-width:1.5}
.chart .hit{fill:transparent}
.chart .hit:hover{fill:var(--grid);opacity:.5}
"""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart.

    Args:
        name: for the legend and the hover text.
        points: (x, y), x ascending; y None where there is no finite value.
        colour: index into the series colours.
        style: `line`, `dashed`, or `dots` (a line through visible points).
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    style: str = "line"

    @property
    def values(self) -> list[float]:
        """The finite values."""
        return [y for _, y in self.points if y is not None]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    low: float | None = None,
    high: float | None = None,
    form: Callable[[float], str] = number,
) -> str:
    """An SVG chart of the series over steps.

    Args:
        series: lines with at least one finite value among them.
        label: what a screen reader says.
        low, high: bounds that the y axis must include; None leaves it to the values.
        form: writes a y value.
    """
    values = [value for one in series for value in one.values]
    assert values, "a chart needs a value"
    xs = [x for one in series for x, _ in one.points]
    x_ticks = round_ticks(min(xs), max(xs), 5, whole=True)
    y_ticks = round_ticks(
        min([*values, *([] if low is None else [low])]),
        max([*values, *([] if high is None else [high])]),
        4,
    )
    frame = Scale(min(xs), max(xs), y_ticks[0], y_ticks[-1])
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [f'<svg class="chart" {size} role="img" aria-label="{escape(label)}">']
    parts += _axes(frame, x_ticks, y_ticks, form)
    for one in series:
        parts += _curve(one, frame)
    parts += _hits(series, frame, form)
    parts.append("</svg>")
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Scale:
    """The ranges of both axes, mapped to the drawing's coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = (self.y_high - self.y_low) or 1.0
        return HEIGHT - BOTTOM - (value - self.y_low) / span * (HEIGHT - TOP - BOTTOM)


def round_ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Ticks at multiples of 1, 2, 2.5 or 5 times a power of ten that enclose low and high.

    Args:
        low, high: the range; an empty one is widened.
        count: about how many intervals.
        whole: only whole numbers, and none outside the range.
    """
    if high <= low:
        pad = abs(low) * 0.5 or 1.0
        low, high = (low, low + 1) if whole else (low - pad, high + pad)
    rough = (high - low) / count
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in factors if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def thin(points: Sequence[tuple[float, float | None]], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: each the mean of equally many neighbours; gaps are left out."""
    finite = [(x, y) for x, y in points if y is not None]
    if len(finite) <= limit:
        return finite
    size = math.ceil(len(finite) / limit)
    groups = [finite[start : start + size] for start in range(0, len(finite), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Means of each value and at most `reach` neighbours a side, as many on each: a rise stays."""
    count = len(values)
    reaches = [min(reach, index, count - 1 - index) for index in range(count)]
    return [statistics.fmean(values[i - near : i + near + 1]) for i, near in enumerate(reaches)]


def _axes(
    frame: Scale,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    form: Callable[[float], str],
) -> Iterator[str]:
    base = HEIGHT - BOTTOM
    for tick in y_ticks:
        y = frame.y(tick)
        name = "axis" if tick == y_ticks[0] else "grid"
        yield f'<line class="{name}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        text = escape(form(tick))
        yield f'<text x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
    for index, tick in enumerate(x_ticks):
        text = f"step {tick:,.0f}" if index == len(x_ticks) - 1 else f"{tick:,.0f}"
        anchor = "end" if frame.x(tick) > WIDTH - RIGHT - 20 else "middle"
        x = min(frame.x(tick), WIDTH - RIGHT)
        yield f'<text x="{x:.1f}" y="{base + 15}" text-anchor="{anchor}">{escape(text)}</text>'


def _curve(one: Series, frame: Scale) -> Iterator[str]:
    colour = series_colour(one.colour)
    runs = [
        [(x, y) for x, y in group if y is not None]
        for finite, group in groupby(one.points, key=lambda point: point[1] is not None)
        if finite
    ]
    for run in runs:
        points = thin(run)
        if len(points) < len(run):
            yield _band(run, frame, colour)
        if one.style == "line" and len(one.values) >= SMOOTH_FROM:
            yield _path(points, frame, colour, "curve raw")
            means = smooth([y for _, y in points], max(2, len(points) // 14))
            points = [(x, y) for (x, _), y in zip(points, means, strict=True)]
        yield _path(points, frame, colour, "curve dashed" if one.style == "dashed" else "curve")
        if one.style == "dots" or (one.style == "line" and len(points) == 1):
            for x, y in points:
                yield (
                    f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}" '
                    'stroke="var(--surface)" stroke-width="1.5"/>'
                )


def _band(run: Sequence[Point], frame: Scale, colour: str) -> str:
    """Between the least and the largest of the values whose means are drawn."""
    size = math.ceil(len(run) / MAX_POINTS)
    groups = [run[start : start + size] for start in range(0, len(run), size)]
    top = [(group[-1][0], max(y for _, y in group)) for group in groups]
    bottom = [(group[-1][0], min(y for _, y in group)) for group in reversed(groups)]
    outline = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in (*top, *bottom))
    return f'<path class="band" style="fill:{colour}" d="M{outline}Z"/>'


def _path(points: Sequence[Point], frame: Scale, colour: str, name: str) -> str:
    steps = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
    return f'<path class="{name}" style="stroke:{colour}" d="M{steps}"/>'


def _hits(series: Sequence[Series], frame: Scale, form: Callable[[float], str]) -> Iterator[str]:
    """Invisible columns; a browser shows the title of the one under the pointer."""
    columns: dict[float, list[str]] = {}
    for one in series:
        for x, y in thin(one.points, MAX_HITS):
            columns.setdefault(x, []).append(f"{one.name} {form(y)}")
    width = (WIDTH - LEFT - RIGHT) / len(columns)
    for x, lines in sorted(columns.items()):
        yield (
            f'<rect class="hit" x="{frame.x(x) - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}">'
            f"<title>{escape(', '.join([f'step {x:,.0f}', *lines]))}</title></rect>"
        )
