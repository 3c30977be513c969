"""Line charts as inline SVG: axes with round ticks, a curve's values, its trend and its spread.

What a page shows where no script runs, and prints; `static/charts.js` draws the same curves for
everyone else, with a zoom.

Promises: plain text in, markup out, everything escaped; no script. Knows nothing of runs; colours
come from the variables of `theme`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from m2flow.observe.curve_data import Curve
from m2flow.observe.formatting import number

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 24
DOTS = 60
"""A curve without a trend has visible points if it has no more than these; a dashed one, one."""

CHART_CSS = """
.chart{display:block;width:100%;height:auto;overflow:visible}
.chart text{font-size:10.5px;fill:var(--faint);font-variant-numeric:tabular-nums}
.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .axis{stroke:var(--line);stroke-width:1}
.chart .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.chart .raw{stroke-width:1;opacity:.4}
.chart .band{opacity:.17}
.chart .dashed{stroke-dasharray:5 4;stroke-width:1.5}
"""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart.

    Args:
        name: for the legend.
        curve: its values over the chart's axis, at least one of them a number.
        colour: a CSS colour.
        dashed: drawn so.
    """

    name: str
    curve: Curve
    colour: str
    dashed: bool = False

    @property
    def values(self) -> list[float]:
        """The values that there are."""
        return [value for value in self.curve["mean"] if value is not None]


def line_chart(
    x: Sequence[int],
    lines: Sequence[ChartLine],
    *,
    label: str,
    low: float | None = None,
    high: float | None = None,
    form: Callable[[float], str] = number,
) -> str:
    """An SVG chart of the lines over steps.

    Args:
        x: the axis of all lines, ascending.
        lines: at least one.
        label: what a screen reader says.
        low, high: bounds that the y axis must include; None leaves it to the values.
        form: writes a y value.
    """
    values = [value for line in lines for value in line.values]
    x_ticks = round_ticks(x[0], x[-1], 5, whole=True)
    y_ticks = round_ticks(
        min([*values, *([] if low is None else [low])]),
        max([*values, *([] if high is None else [high])]),
        4,
    )
    frame = Scale(x[0], x[-1], y_ticks[0], y_ticks[-1])
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [f'<svg class="chart" {size} role="img" aria-label="{escape(label)}">']
    parts += _axes(frame, x_ticks, y_ticks, form)
    for line in lines:
        parts += _line(x, line, frame)
    return "".join([*parts, "</svg>"])


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


def _line(x: Sequence[int], line: ChartLine, frame: Scale) -> Iterator[str]:
    """The spread, the values and the trend; without a trend the values alone."""
    curve, name = line.curve, "curve dashed" if line.dashed else "curve"
    points = _points(x, curve["mean"], frame)
    if curve["trend"]:
        outline = [*_points(x, curve["high"], frame), *reversed(_points(x, curve["low"], frame))]
        yield f'<path class="band" style="fill:{line.colour}" d="M{_joined(outline)}Z"/>'
        yield _path(points, line.colour, "curve raw")
        points = _points(x, curve["trend"], frame)
    yield _path(points, line.colour, name)
    if not curve["trend"] and len(points) <= (1 if line.dashed else DOTS):
        for left, top in points:
            yield (
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="{line.colour}" '
                'stroke="var(--surface)" stroke-width="1.5"/>'
            )


def _points(x: Sequence[int], values: Sequence[float | None], frame: Scale) -> list[Point]:
    return [
        (frame.x(step), frame.y(value))
        for step, value in zip(x, values, strict=True)
        if value is not None
    ]


def _path(points: Sequence[Point], colour: str, name: str) -> str:
    return f'<path class="{name}" style="stroke:{colour}" d="M{_joined(points)}"/>'


def _joined(points: Sequence[Point]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
