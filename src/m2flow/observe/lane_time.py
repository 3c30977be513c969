"""The report's account of lanes: the picture of one or two steps, and the table over all steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from html import escape
from operator import add

from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.gantt import (
    MAX_ROWS,
    appearing_stages,
    busy,
    gantt_svg,
    legend,
    short_names,
    told,
)
from m2flow.observe.page import legend_entry
from m2flow.observe.theme import stage_colours
from m2flow.observe.trace import StepSpans, Trace
from m2flow.plan.gantt import Gantt, lane_names, lay_out
from m2flow.simulation.time_account import TERM_OF, WORK, LaneTime, where_the_time_went

MAX_LANES = 64
FILLS = {term: f"var(--{kind})" for kind, term in TERM_OF.items()}
"""The colour of each term that is no stage."""


def pictured_steps(trace: Trace) -> list[StepSpans]:
    """The steps worth a picture: the last two that follow each other, else the last."""
    steps = [step for step in trace.steps if step.spans]
    if len(steps) > 1 and steps[-1].step == steps[-2].step + 1:
        return steps[-2:]
    return steps[-1:]


def chart_of(steps: Sequence[StepSpans]) -> Gantt:
    """The lanes of some steps."""
    spans = [span for step in steps for span in step.spans]
    window = (steps[0].start, max(step.end for step in steps)) if steps else None
    return lay_out(spans, window)


def stage_palette(trace: Trace, names: Sequence[str] = ()) -> dict[str, str]:
    """A colour for every stage that the trace knows, and for further names."""
    stages = appearing_stages(chart_of(pictured_steps(trace)))
    return stage_colours([*stages, *(name for one in trace.totals for name in one.stages), *names])


def timeline_svg(trace: Trace, *, title: str | None = None, standalone: bool = False) -> str:
    """The picture of the last steps; empty if nothing was recorded."""
    steps = pictured_steps(trace)
    if not steps:
        return ""
    return gantt_svg(
        chart_of(steps),
        steps=[(step.step, step.start, step.end) for step in steps],
        colours=stage_palette(trace),
        title=title,
        standalone=standalone,
        ident="timeline" if standalone else "lanes",
    )


def timeline_data(trace: Trace) -> dict[str, object]:
    """The picture of the last steps for `static/charts.js`, which draws it with a zoom."""
    steps = pictured_steps(trace)
    chart, colours = chart_of(steps), stage_palette(trace)
    names = short_names(colours)
    rows = chart.rows[:MAX_ROWS]
    kinds = {(piece.kind, piece.name): piece for row in rows for piece in row.pieces}
    places = {kind: place for place, kind in enumerate(kinds)}
    return {
        "seconds": chart.seconds,
        "legend": legend(chart, colours),
        "terms": [
            {
                "name": told(piece),
                "colour": colours.get(piece.term) or f"var(--{piece.kind})",
                "inside": names.get(piece.name, piece.name) if piece.kind in WORK else "",
            }
            for piece in kinds.values()
        ],
        "steps": [
            [
                f"step {step.step}, {seconds(step.end - step.start)}",
                step.start - chart.start,
                step.end - chart.start,
            ]
            for step in steps
        ],
        "rows": [
            {
                "name": f"{lane_names(row.lanes)} · {busy(row, chart)}",
                "lanes": lane_names(row.lanes),
                "pieces": [
                    [
                        round(piece.start - chart.start, 6),
                        round(piece.seconds, 6),
                        places[piece.kind, piece.name],
                    ]
                    for piece in row.pieces
                ],
            }
            for row in rows
        ],
    }


def time_table(trace: Trace) -> str:
    """Seconds of each lane by stage and overhead, with shares; empty if nothing was recorded."""
    spans = [span for step in trace.steps for span in step.spans]
    totals = trace.totals or where_the_time_went(spans)
    if not totals:
        return ""
    colours = stage_palette(trace) | FILLS
    spent = {name for total in totals for name, amount in _spent(total).items() if amount > 0}
    columns = {name: colour for name, colour in colours.items() if name in spent}
    names = short_names(columns)
    head = "".join(f"<th>{escape(names[name])}</th>" for name in columns)
    rows = [_row(f"lane {total.lane}", total, columns) for total in totals[:MAX_LANES]]
    if len(totals) > 1:
        whole = _row(f"all {len(totals)} lanes", reduce(add, totals), columns)
        rows.append(whole.replace("<tr>", '<tr class="sum">', 1))
    legend = "".join(legend_entry(names[name], columns[name], box=True) for name in columns)
    return (
        f'<div class="card"><div class="scroll"><table><thead><tr><th>lane</th>{head}<th>idle</th>'
        f"<th>shares</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<div class="legend" style="margin-top:10px">{legend}</div></div>'
    )


def time_note(trace: Trace) -> str:
    """Say over which steps the table sums, and how many spans were dropped."""
    if not trace.totals:
        return ""
    total = max(lane.seconds for lane in trace.totals)
    note = f"{trace.num_steps} steps, {seconds(total)} on each lane"
    dropped = sum(step.dropped for step in trace.steps)
    if len(trace.totals) > MAX_LANES:
        note += f"; the first {MAX_LANES} of {len(trace.totals)} lanes"
    return note + (f"; {number(dropped)} spans were dropped" if dropped else "")


def _spent(total: LaneTime) -> dict[str, float]:
    """Seconds by stage, and by the terms of `FILLS`; idleness is told beside them."""
    return {**total.stages, **total.beside}


def _row(name: str, total: LaneTime, columns: Mapping[str, str]) -> str:
    spent = _spent(total)
    cells = [_cell(spent.get(column, 0.0), total) for column in columns]
    bars = "".join(
        f'<i style="width:{100 * total.share(spent[column]):.2f}%;background:{colour}"></i>'
        for column, colour in columns.items()
        if spent.get(column, 0.0) > 0
    )
    return (
        f"<tr><td>{escape(name)}</td>{''.join(cells)}{_cell(total.idle, total)}"
        f'<td class="bar"><div class="stack">{bars}</div></td></tr>'
    )


def _cell(amount: float, total: LaneTime) -> str:
    if amount <= 0:
        return "<td><small>–</small></td>"
    return f"<td>{seconds(amount)} <small>{percent(total.share(amount))}</small></td>"
