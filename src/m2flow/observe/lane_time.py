"""The report's account of lanes: the picture of one or two steps, and the table over all steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.gantt import OVERHEAD, appearing_stages, gantt_svg, short_names
from m2flow.observe.page import legend_entry
from m2flow.observe.spans import LaneTime, SpanLike, where_the_time_went
from m2flow.observe.theme import series_colour
from m2flow.observe.trace import StepSpans, Trace, lane_label

MAX_LANES = 64


def pictured_steps(trace: Trace) -> list[StepSpans]:
    """The steps worth a picture: the last two that follow each other, else the last."""
    steps = [step for step in trace.steps if step.spans]
    if len(steps) > 1 and steps[-1].step == steps[-2].step + 1:
        return steps[-2:]
    return steps[-1:]


def stage_palette(trace: Trace) -> dict[str, str]:
    """A colour for every stage that the trace knows, the same in the picture and the table."""
    spans = [span for step in pictured_steps(trace) for span in step.spans]
    stages = appearing_stages(spans)
    stages += [stage for total in trace.totals for stage in total.stages]
    return {stage: series_colour(index) for index, stage in enumerate(dict.fromkeys(stages))}


def timeline_svg(trace: Trace, *, title: str | None = None, standalone: bool = False) -> str:
    """The picture of the last steps; empty if nothing was recorded."""
    steps = pictured_steps(trace)
    if not steps:
        return ""
    spans: list[SpanLike] = [span for step in steps for span in step.spans]
    return gantt_svg(
        spans,
        window=(steps[0].start, max(step.end for step in steps)),
        steps=[(step.step, step.start, step.end) for step in steps],
        colours=stage_palette(trace),
        title=title,
        standalone=standalone,
        ident="timeline" if standalone else "lanes",
    )


def time_table(trace: Trace) -> str:
    """Seconds of each lane by stage and overhead, with shares; empty if nothing was recorded."""
    totals = trace.totals or where_the_time_went(
        [span for step in trace.steps for span in step.spans]
    )
    if not totals:
        return ""
    colours = stage_palette(trace)
    stages = [stage for stage in colours if any(stage in total.stages for total in totals)]
    names = short_names(stages)
    overhead = [kind for kind in OVERHEAD if any(_overhead(total)[kind] > 0 for total in totals)]
    head = "".join(
        f"<th>{escape(name)}</th>"
        for name in [
            "lane",
            *(names[stage] for stage in stages),
            *(OVERHEAD[kind] for kind in overhead),
            "idle",
            "",
        ]
    )
    rows = [_row(total, stages, overhead, colours) for total in totals[:MAX_LANES]]
    if len(totals) > 1:
        rows.append(_row(_sum(totals), stages, overhead, colours, name=f"all {len(totals)} lanes"))
    legend = "".join(legend_entry(names[stage], colours[stage], box=True) for stage in stages)
    legend += "".join(legend_entry(OVERHEAD[k], f"var(--{k})", box=True) for k in overhead)
    return (
        f'<div class="card"><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f'<div class="legend" style="margin-top:10px">{legend}</div></div>'
    )


def time_note(trace: Trace) -> str:
    """Over what the table sums, and what the recorder had to leave out."""
    if not trace.totals:
        return ""
    total = max(lane.seconds for lane in trace.totals)
    note = f"{trace.num_steps} steps, {seconds(total)} on each lane"
    dropped = sum(step.dropped for step in trace.steps)
    if len(trace.totals) > MAX_LANES:
        note += f"; the first {MAX_LANES} of {len(trace.totals)} lanes"
    return note + (f"; {number(dropped)} spans were dropped" if dropped else "")


def _overhead(total: LaneTime) -> dict[str, float]:
    return {
        "switch": total.switching,
        "transfer": total.transfer,
        "publish": total.publishing,
        "wait": total.waiting,
    }


def _sum(totals: Sequence[LaneTime]) -> LaneTime:
    whole = LaneTime("all", 0.0, {})
    for total in totals:
        whole += dataclasses.replace(total, lane="all")
    return whole


def _row(
    total: LaneTime,
    stages: Sequence[str],
    overhead: Sequence[str],
    colours: Mapping[str, str],
    name: str | None = None,
) -> str:
    spent = _overhead(total)
    amounts = [total.stages.get(stage, 0.0) for stage in stages]
    amounts += [spent[kind] for kind in overhead]
    cells = [f"<td>{escape(name or lane_label(total.lane))}</td>"]
    cells += [_cell(amount, total) for amount in [*amounts, total.idle]]
    fills = [colours[stage] for stage in stages] + [f"var(--{kind})" for kind in overhead]
    bars = "".join(_bars(amounts, fills, total))
    cells.append(f'<td class="bar"><div class="stack">{bars}</div></td>')
    opening = '<tr class="sum">' if name else "<tr>"
    return f"{opening}{''.join(cells)}</tr>"


def _cell(amount: float, total: LaneTime) -> str:
    if amount <= 0:
        return "<td><small>–</small></td>"
    return f"<td>{seconds(amount)} <small>{percent(total.share(amount))}</small></td>"


def _bars(amounts: Sequence[float], fills: Sequence[str], total: LaneTime) -> Iterator[str]:
    for amount, fill in zip(amounts, fills, strict=True):
        if amount > 0:
            yield f'<i style="width:{100 * total.share(amount):.2f}%;background:{fill}"></i>'
