"""The report's section on the plan: who stands where, what was predicted, and what came of it.

Reads `plan.json`, and `decision.json` where the planner chose; a run whose mode was fixed has none,
and the section says so. A plan file may hold anything: what is missing or of the wrong kind is left
out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from m2flow.observe.curves import EXPECTED
from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.gantt import gantt_svg
from m2flow.observe.lane_time import chart_of, pictured_steps, stage_palette
from m2flow.observe.page import section
from m2flow.observe.record import RunRecord, as_number
from m2flow.observe.trace import StepSpans
from m2flow.plan.explain import Explanation
from m2flow.plan.file import to_json
from m2flow.simulation.time_account import TERMS, where_the_time_went


def plan_section(record: RunRecord) -> str:
    """The section; empty for a run without a plan."""
    if not record.plan:
        return ""
    cards = [_outcome(record), _race(record.decision), _pictures(record), _tables(record.plan)]
    body = f'<div class="cards">{"".join(cards)}</div>{_whole(record)}'
    return section("Plan", body, _note(record.plan))


def _note(plan: Mapping[str, Any]) -> str:
    parts = []
    if plan.get("mode"):
        parts.append(f"mode {plan['mode']}")
    if isinstance(plan.get("lanes"), (list, dict)):
        parts.append(f"{len(plan['lanes'])} lanes")
    predicted = as_number(plan.get("predicted_seconds"))
    if predicted is not None:
        parts.append(f"{seconds(predicted)} a step expected")
    return ", ".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text; empty without rows."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


# --- what was expected, why, and what came of it --------------------------------------------------


def _outcome(record: RunRecord) -> str:
    if record.decision is None:
        if as_number(record.plan.get("predicted_seconds")) is not None:
            return ""
        text = "The mode was fixed by the user: no other plan was considered, and none predicted."
        return f'<p class="note">{text}</p>'
    figures = _table(("plan", "a step", "remark"), _figures(record, record.decision))
    why = "".join(f"<li>{escape(line)}</li>" for line in _reasons(record.decision))
    return (
        f'<div class="card"><div class="pair"><div>{figures}</div>'
        f"<div><h3>Why this plan</h3><ul>{why}</ul></div></div></div>"
    )


def _figures(record: RunRecord, decision: Explanation) -> Iterator[tuple[str, str, str]]:
    """(what, seconds, remark): the prediction, the run, the plans that were not chosen."""
    yield "predicted", seconds(decision.seconds), "when it was chosen"
    expected = record.values(EXPECTED)
    if expected and abs(expected[-1] - decision.seconds) > 0.01 * decision.seconds:
        yield "predicted since", seconds(expected[-1]), "by what the steps before have taken"
    measured = record.values("seconds/step")
    if measured:
        rows = ((row.get("seconds/step"), row.get(EXPECTED)) for row in record.metrics)
        pairs = [(as_number(taken), as_number(hoped)) for taken, hoped in rows]
        ratios = [taken / hoped for taken, hoped in pairs if taken and hoped]
        remark = f"{number(median(ratios))} of what was predicted of each step" if ratios else ""
        yield "measured (median)", seconds(median(measured)), remark
    for rank, other in enumerate(decision.runners_up):
        name = "runner-up" if rank == 0 else "then"
        yield f"{name}: {other.title}", seconds(other.seconds), ""


def _reasons(decision: Explanation) -> Iterator[str]:
    bound, idle = decision.bottleneck, decision.predicted.idle.values()
    why = f"; {bound.why}" if bound.why else ""
    yield f"bottleneck: {bound.what}, {percent(bound.share)} of the step{why}"
    if idle:
        yield f"lanes were expected to be idle for {percent(sum(idle) / len(idle))} of their time"
    for other in decision.runners_up[:1]:
        yield f"the runner-up differs: {'; '.join(other.changes)}"
    for flip in (decision.flips or ())[:4]:
        yield f"{flip.input} x {number(flip.factor)} would make {flip.mode} the best"
    for plan, reason in decision.ruled_out.items():
        yield f"ruled out: {plan}, {reason}"
    for line in decision.assumptions:
        yield f"assumed: {line}"


def _race(decision: Explanation | None) -> str:
    """The plans that the first steps of the run have tried."""
    if decision is None or not decision.race:
        return ""
    rows = [
        (
            row.plan,
            "–" if row.predicted is None else seconds(row.predicted),
            seconds(median(row.measured)) if row.measured else "–",
            str(len(row.measured)),
            row.verdict or "racing",
        )
        for row in decision.race
    ]
    table = _table(("plan", "predicted", "measured (median)", "steps", "verdict"), rows)
    return f'<div class="card"><h3>Tried in real steps</h3>{table}</div>'


# --- pictures and terms ---------------------------------------------------------------------------


def _pictures(record: RunRecord) -> str:
    """The predicted step beside a measured one, and where the time of each went."""
    decision = record.decision
    if decision is None or not decision.timeline.rows:
        return ""
    steps = pictured_steps(record.trace)[-1:]
    colours = stage_palette(record.trace, decision.stages)
    charts = [("predicted", "predicted", decision.timeline)]
    charts += [(f"measured, step {step.step}", "measured", chart_of([step])) for step in steps]
    halves = "".join(
        f"<div><h3>{escape(name)}</h3>"
        f'<div class="scroll">{gantt_svg(chart, colours=colours, width=720, ident=ident)}</div>'
        "</div>"
        for name, ident, chart in charts
    )
    return f'<div class="card"><div class="pair">{halves}</div>{_terms(decision, steps)}</div>'


def _terms(decision: Explanation, steps: Sequence[StepSpans]) -> str:
    """Seconds of a lane by term, as predicted and as measured in the step that is shown."""
    columns = [{term: decision.predicted.terms.get(term, 0.0) for term in TERMS}]
    counts = [max(1, decision.num_lanes)]
    for step in steps:
        known = decision.predicted.idle  # of every lane: one without a span counts too
        lanes = where_the_time_went(step.spans, (step.start, step.end), known)
        columns.append({term: sum(lane.terms[term] for lane in lanes) for term in TERMS})
        counts.append(max(1, len(lanes)))
    rows = [
        (term, *(seconds(one[term] / n) for one, n in zip(columns, counts, strict=True)))
        for term in TERMS
    ]
    return _table(("a lane, in the mean", "predicted", "measured")[: 1 + len(columns)], rows)


# --- the plan itself ------------------------------------------------------------------------------


def _tables(plan: Mapping[str, Any]) -> str:
    tables = _table(("worker", "lanes"), _placements(plan))
    tables += _table(("stage", "items a call"), _chunks(plan))
    return f'<div class="card plan">{tables}</div>' if tables else ""


def _whole(record: RunRecord) -> str:
    files = [(record.directory.plan.name, json.dumps(record.plan, indent=2, ensure_ascii=False))]
    if record.decision is not None:
        files.append((record.directory.decision.name, to_json(record.decision)))
    return "".join(
        f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>"
        for name, text in files
    )


def _placements(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for worker, placement in _mapping(plan.get("placements")).items():
        replicas = _mapping(placement).get("replicas")
        if isinstance(replicas, list) and all(isinstance(gang, list) for gang in replicas):
            yield worker, ", ".join("+".join(str(lane) for lane in gang) for gang in replicas)


def _chunks(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for stage, choice in _mapping(plan.get("stages")).items():
        chunk = _mapping(choice).get("chunk")
        yield stage, "all at once" if chunk is None else str(chunk)


def _mapping(value: object) -> Mapping[str, Any]:
    """What was read if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}
