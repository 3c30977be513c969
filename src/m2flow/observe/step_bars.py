"""The report's latency breakdown: a bar for each step, its height the step's seconds.

Promises: the parts of a bar are the seconds that a lane spent in each stage, in the mean over the
lanes, and the rest of the step (switches, transfers, waits, idleness) stands on top; where calls
began before the step they may be more than the step has, and are drawn in proportion. So a bar ends
where the step did. However long the run, at most `MAX_BARS` bars are drawn, each the mean of
its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from m2flow.observe.charts import BOTTOM, RIGHT, TOP, round_ticks
from m2flow.observe.formatting import seconds
from m2flow.observe.gantt import short_names
from m2flow.observe.lane_time import stage_palette
from m2flow.observe.page import legend_entry
from m2flow.observe.record import RunRecord, as_number

MAX_BARS = 60
WIDTH, HEIGHT, LEFT = 1180, 240, 56
PREFIX = "seconds/"
REST, REST_COLOUR = "not in a stage", "var(--wait)"


def step_bars(record: RunRecord) -> str:
    """The picture with its legend; empty for a run whose steps have no seconds."""
    bars = _bars(record.metrics, _num_lanes(record))
    if not bars:
        return ""
    names = list(dict.fromkeys(name for _, parts in bars for name in parts if name != REST))
    colours = {name: stage_palette(record.trace, names)[name] for name in names}
    colours[REST] = REST_COLOUR
    shown = short_names(colours)
    legend = "".join(legend_entry(shown[name], colours[name], box=True) for name in colours)
    return (
        f'<div class="card"><div class="scroll">{_svg(bars, colours)}</div>'
        f'<div class="legend">{legend}</div></div>'
    )


def _num_lanes(record: RunRecord) -> int:
    lanes = record.plan.get("lanes")
    return max(1, len(lanes) if isinstance(lanes, (list, dict)) else len(record.trace.totals))


def _bars(
    rows: Sequence[Mapping[str, object]], num_lanes: int
) -> list[tuple[str, dict[str, float]]]:
    """For each bar the steps it stands for, in words, and seconds by stage; the rest comes last."""
    steps = [row for row in rows if as_number(row.get("seconds/step"))]
    size = max(1, math.ceil(len(steps) / MAX_BARS))
    bars = []
    for start in range(0, len(steps), size):
        some = steps[start : start + size]
        first, last = some[0]["step"], some[-1]["step"]
        name = f"step {first}" if len(some) == 1 else f"steps {first} to {last}"
        keys = dict.fromkeys(key for row in some for key in row if key.startswith(PREFIX))
        means = {key: fmean(as_number(row.get(key)) or 0.0 for row in some) for key in keys}
        whole = means.pop("seconds/step")
        parts = {key.removeprefix(PREFIX): mean / num_lanes for key, mean in means.items()}
        if (in_stages := sum(parts.values())) > whole:
            parts = {name: part * whole / in_stages for name, part in parts.items()}
        parts[REST] = max(0.0, whole - in_stages)
        bars.append((name, parts))
    return bars


def _svg(bars: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, str]) -> str:
    ticks = round_ticks(0.0, max(sum(parts.values()) for _, parts in bars), 4)
    base, scale = HEIGHT - BOTTOM, (HEIGHT - TOP - BOTTOM) / ticks[-1]
    slot = (WIDTH - LEFT - RIGHT) / len(bars)
    width = min(slot * 0.78, 60.0)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    label = 'role="img" aria-label="Seconds of each step by stage"'
    drawn = [f'<svg class="chart bars" {size} {label}>']
    for tick in ticks:
        y = base - tick * scale
        drawn.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{seconds(tick)}</text>'
        )
    every = math.ceil(len(bars) / 12)
    for index, (name, parts) in enumerate(bars):
        x, y = LEFT + slot * index + (slot - width) / 2, float(base)
        told = [f"{part} {seconds(value)}" for part, value in parts.items() if value > 0]
        drawn.append(f"<g><title>{escape(', '.join([name, *told]))}</title>")
        for part, value in parts.items():
            y -= value * scale
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.2f}" width="{width:.1f}" height="{value * scale:.2f}" '
                f'fill="{colours[part]}"/>'
            )
        drawn.append("</g>")
        if index % every == 0:
            label = name.split()[1]
            middle = x + width / 2
            drawn.append(
                f'<text x="{middle:.1f}" y="{base + 15}" text-anchor="middle">{label}</text>'
            )
    return "".join([*drawn, "</svg>"])
