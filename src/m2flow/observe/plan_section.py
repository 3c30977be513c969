"""The report's section on the plan: who stands where, what was predicted, and what came of it.

Reads `plan.json`, and `decision.json` where the planner chose; a run whose mode was fixed has none,
and the section says so. Both may hold anything: what is missing or of the wrong kind is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.gantt import gantt_svg
from m2flow.observe.lane_time import pictured_steps, stage_palette
from m2flow.observe.page import section
from m2flow.observe.record import RunRecord, as_number
from m2flow.observe.spans import PRECEDENCE, Lane, LaneTime, Span, where_the_time_went
from m2flow.observe.theme import series_colour
from m2flow.observe.trace import StepSpans

TERMS = ("compute", "switching", "publishing", "links", "waiting")


def plan_section(record: RunRecord) -> str:
    """The section; empty for a run without a plan."""
    if not record.plan:
        return ""
    decision = _table(record.decision.get("decision", record.decision))
    cards = [_outcome(record, decision), _pictures(record, decision), _tables(record)]
    body = f'<div style="display:grid;gap:14px">{"".join(cards)}</div>{_whole(record)}'
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


# --- what was expected, why, and what came of it --------------------------------------------------


def _outcome(record: RunRecord, decision: Mapping[str, Any]) -> str:
    if not decision:
        if as_number(record.plan.get("predicted_seconds")) is not None:
            return ""
        text = "The mode was fixed by the user: no other plan was considered, and none predicted."
        return f'<p class="note">{text}</p>'
    rows = "".join(
        f'<tr><td style="white-space:normal">{escape(name)}</td>'
        f"<td>{escape(figure)}{f'<small>{escape(more)}</small>' if more else ''}</td></tr>"
        for name, figure, more in _figures(record, decision)
    )
    why = "".join(f"<li>{escape(line)}</li>" for line in _reasons(decision))
    table = f"<table><tr><th>plan</th><th>a step</th></tr>{rows}</table>" if rows else ""
    return (
        f'<div class="card"><div class="pair"><div>{table}</div>'
        f"<div><h3>Why this plan</h3><ul>{why}</ul></div></div></div>"
    )


def _figures(record: RunRecord, decision: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(what, seconds, remark): the prediction, the run, the plans that were not chosen."""
    predicted = as_number(_table(decision.get("predicted")).get("seconds"))
    if predicted is not None:
        yield "predicted", seconds(predicted), ""
    measured = record.values("seconds/step")
    if measured:
        taken = median(measured)
        ratio = f"{number(taken / predicted)} of what was predicted" if predicted else ""
        yield "measured (median)", seconds(taken), ratio
    for number_of_it, other in enumerate(_listed(decision.get("runners_up"))):
        other = _table(other)
        theirs = as_number(_table(other.get("predicted")).get("seconds"))
        if theirs is not None:
            name = "runner-up" if number_of_it == 0 else "then"
            title = other.get("title") or other.get("mode") or ""
            yield f"{name}: {title}", seconds(theirs), ""


def _reasons(decision: Mapping[str, Any]) -> Iterator[str]:
    bound = _table(decision.get("bottleneck"))
    if bound:
        share = as_number(bound.get("share"))
        of_it = f", {percent(share)} of the step" if share is not None else ""
        yield f"bottleneck: {bound.get('what')}{of_it}. {_sentence(bound.get('why'))}"
    idle = as_number(_table(decision.get("predicted")).get("idle_mean"))
    if idle is not None:
        yield f"lanes were expected to be idle for {percent(idle)} of their time"
    for other in _listed(decision.get("runners_up"))[:1]:
        changes = "; ".join(str(change) for change in _listed(_table(other).get("changes")))
        yield f"the runner-up differs: {changes}"
    for flip in map(_table, _listed(decision.get("flips"))[:4]):
        factor = as_number(flip.get("factor"))
        if factor is not None:
            yield f"{flip.get('input')} x {number(factor)} would make {flip.get('mode')} the best"
    for line in _listed(decision.get("assumptions")):
        yield f"assumed: {line}"


def _sentence(value: object) -> str:
    text = str(value or "")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


# --- pictures and terms ---------------------------------------------------------------------------


def _pictures(record: RunRecord, decision: Mapping[str, Any]) -> str:
    """The predicted step beside a measured one, and where the time of each went."""
    spans, window = _predicted_spans(decision)
    if not spans:
        return ""
    steps = pictured_steps(record.trace)[-1:]
    colours = stage_palette(record.trace)
    names = [str(name) for name in _listed(decision.get("stages"))]
    for name in (*names, *(span.name for span in spans if span.kind in ("call", "finish"))):
        colours.setdefault(name, series_colour(len(colours)))
    drawn = [("predicted", gantt_svg(
        spans, window=(0.0, window), colours=colours, width=720, ident="predicted"
    ))]  # fmt: skip
    for step in steps:
        picture = gantt_svg(
            step.spans, window=(step.start, step.end), colours=colours, width=720, ident="measured"
        )
        drawn.append((f"measured, step {step.step}", picture))
    halves = "".join(f"<div><h3>{escape(name)}</h3>{svg}</div>" for name, svg in drawn)
    terms = _terms(decision, steps)
    return f'<div class="card"><div class="pair">{halves}</div>{terms}</div>'


def _predicted_spans(decision: Mapping[str, Any]) -> tuple[list[Span], float]:
    """What `decision.json` says of the predicted step, a row for lanes that are alike."""
    timeline = _table(decision.get("timeline"))
    window = as_number(timeline.get("seconds"))
    found: list[Span] = []
    for row in map(_table, _listed(timeline.get("rows"))):
        lane = _lane(_listed(row.get("lanes")))
        for piece in map(_table, _listed(row.get("pieces"))):
            start, end = as_number(piece.get("start")), as_number(piece.get("end"))
            kind = str(piece.get("kind"))
            if start is not None and end is not None and end >= start and kind in PRECEDENCE:
                found.append(Span(lane, str(piece.get("name")), kind, start, end))  # type: ignore[arg-type]
    return (found, window) if window else ([], 0.0)


def _lane(numbers: Sequence[object]) -> Lane:
    """One lane by its number, several that are alike by the first and the count."""
    if len(numbers) == 1 and isinstance(numbers[0], int):
        return numbers[0]
    return f"{numbers[0]} +{len(numbers) - 1}" if numbers else "?"


def _terms(decision: Mapping[str, Any], steps: Sequence[StepSpans]) -> str:
    """Seconds of a lane by term, as predicted and as measured in the step that is shown."""
    predicted = _table(_table(decision.get("predicted")).get("terms"))
    count = len(_table(_table(decision.get("predicted")).get("idle"))) or 1
    expected = {term: (as_number(predicted.get(term)) or 0.0) / count for term in TERMS}
    if not any(expected.values()):
        return ""
    taken: dict[str, float] | None = None
    for step in steps:
        taken = _mean_terms(where_the_time_went(step.spans, (step.start, step.end)))
    rows = []
    for term in TERMS:
        cells = [seconds(expected[term])] + ([seconds(taken[term])] if taken else [])
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><td>{term}</td>{row}</tr>")
    head = "<th>predicted</th>" + ("<th>measured</th>" if taken else "")
    return f"<table><tr><th>a lane, in the mean</th>{head}</tr>{''.join(rows)}</table>"


def _mean_terms(lanes: Sequence[LaneTime]) -> dict[str, float]:
    """What is neither work nor a transfer, a switch or a publish is waiting."""
    count = max(1, len(lanes))
    return {
        "compute": sum(lane.working for lane in lanes) / count,
        "switching": sum(lane.switching for lane in lanes) / count,
        "publishing": sum(lane.publishing for lane in lanes) / count,
        "links": sum(lane.transfer for lane in lanes) / count,
        "waiting": sum(lane.waiting + lane.idle for lane in lanes) / count,
    }


# --- the plan itself ------------------------------------------------------------------------------


def _tables(record: RunRecord) -> str:
    rows = "".join(
        f"<tr><td>{escape(worker)}</td><td>{escape(lanes)}</td></tr>"
        for worker, lanes in _placements(record.plan)
    )
    tables = f"<table><tr><th>worker</th><th>lanes</th></tr>{rows}</table>" if rows else ""
    chunks = "".join(
        f"<tr><td>{escape(stage)}</td><td>{escape(chunk)}</td></tr>"
        for stage, chunk in _chunks(record.plan)
    )
    if chunks:
        tables += f"<table><tr><th>stage</th><th>items a call</th></tr>{chunks}</table>"
    words = record.plan.get("explanation")
    if isinstance(words, list):
        words = "\n".join(str(line) for line in words)
    tables += f"<pre>{escape(words)}</pre>" if isinstance(words, str) else ""
    return f'<div class="card plan">{tables}</div>' if tables else ""


def _whole(record: RunRecord) -> str:
    files = [(record.directory.plan.name, record.plan)]
    if record.decision:
        files.append((record.directory.decision.name, record.decision))
    return "".join(
        f"<details><summary>{name}</summary>"
        f"<pre>{escape(json.dumps(content, indent=2, ensure_ascii=False))}</pre></details>"
        for name, content in files
    )


def _placements(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for worker, placement in _table(plan.get("placements")).items():
        replicas = _table(placement).get("replicas")
        if isinstance(replicas, list) and all(isinstance(gang, list) for gang in replicas):
            yield worker, ", ".join("+".join(str(lane) for lane in gang) for gang in replicas)


def _chunks(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for stage, choice in _table(plan.get("stages")).items():
        chunk = _table(choice).get("chunk")
        yield stage, "all at once" if chunk is None else str(chunk)


def _table(value: object) -> Mapping[str, Any]:
    """What was read if it is a table, else an empty one."""
    return value if isinstance(value, dict) else {}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
