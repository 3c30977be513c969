"""The timeline as a file: Chrome trace events, which Perfetto and chrome://tracing open.

Promises: one named thread per lane; events of one thread nest (a span that overlaps another partly
gets a second row of its lane, since viewers drop such events otherwise); what is written can be
read back. Times in the file are microseconds since the first span, which `began` puts on the clock
of the spans (seconds since 1970 in a run).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.engine.spans import Span
from m2flow.errors import UserError
from m2flow.observe.jsonl import encode, write_atomically
from m2flow.plan.file import from_json
from m2flow.simulation.time_account import TERM_OF, LaneTime, extent

PROCESS, STEPS_THREAD = 1, 0

LONGEST_SECONDS = 1e12
"""No trace is so long; a file that says so is spoiled."""


@dataclass(frozen=True, slots=True)
class StepSpans:
    """The spans of one step and its window in seconds; `dropped` spans did not fit in memory."""

    step: int
    start: float
    end: float
    spans: Sequence[Span]
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace file holds: the steps kept in detail, and the account over all steps."""

    steps: Sequence[StepSpans] = ()
    totals: Sequence[LaneTime] = ()
    num_steps: int = 0


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write the steps of a trace as events, and the account beside them."""
    origin = min((min(step.start, extent(step.spans)[0]) for step in trace.steps), default=0.0)
    tagged = [(step.step, span) for step in trace.steps for span in step.spans]
    rows = nesting_rows([span for _, span in tagged])
    threads = {key: number for number, key in enumerate(sorted(set(rows)), start=1)}
    events = [_metadata("process_name", STEPS_THREAD, name="m2flow")]
    events += _thread_events("steps", STEPS_THREAD, lane=None)
    for (lane, row), number in threads.items():
        name = f"lane {lane}" + (f" ({row + 1})" if row else "")
        events += _thread_events(name, number, lane=lane)
    for step in trace.steps if trace.num_steps else ():
        marker = Span(-1, f"step {step.step}", "call", step.start, step.end)  # of no lane
        events.append(_event(marker, STEPS_THREAD, origin, step.step))
    for (step_number, span), key in zip(tagged, rows, strict=True):
        events.append(_event(span, threads[key], origin, step_number))
    account = {
        "steps": [
            {
                "step": step.step,
                "start": step.start - origin,
                "end": step.end - origin,
                "dropped": step.dropped,
            }
            for step in trace.steps
        ],
        "num_steps": trace.num_steps,
        "totals": trace.totals,
        "began": origin,
    }
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"m2flow": account}}
    write_atomically(Path(path), encode(document))


def read_trace(path: Path | str) -> Trace:
    """Read a file of `write_trace` back; times are seconds since the first span.

    Raises:
        UserError: the file is no such trace.
    """
    try:
        document = json.loads(Path(path).read_bytes())
        account = document["otherData"]["m2flow"]
        lanes: dict[int, int] = {
            event["tid"]: event["args"]["lane"]
            for event in document["traceEvents"]
            if event["ph"] == "M" and event["args"].get("lane") is not None
        }
        spans: dict[int, list[dict[str, Any]]] = {}
        for event in document["traceEvents"]:
            if event["ph"] == "X" and event["tid"] in lanes:
                step, span = _span(event, lanes[event["tid"]])
                spans.setdefault(step, []).append(span)
        steps = [{"spans": spans.get(step["step"], ()), **step} for step in account["steps"]]
        return _checked({**account, "steps": steps})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            "cannot be read as a timeline", key=str(path), expected="a file written by m2flow"
        ) from error


def _checked(trace: Mapping[str, Any]) -> Trace:
    """A trace, each value of which is of its field's type, and its times no longer than any run.

    Raises:
        ValueError: one is not, or the account of a lane lacks a term.
    """
    checked = from_json(Trace, json.dumps(trace), "timeline", ignore=("began",))
    moments = [moment for step in checked.steps for moment in (step.start, step.end)]
    for step in checked.steps:
        moments += [moment for span in step.spans for moment in (span.start, span.end)]
    for total in checked.totals:
        moments += [total.seconds, *total.stages.values(), *total.beside.values()]
        if total.beside.keys() != set(TERM_OF.values()):
            raise ValueError("a lane's account lacks a term")
    if not all(abs(moment) < LONGEST_SECONDS for moment in moments):
        raise ValueError("a moment is out of reach")
    return checked


def nesting_rows(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """For each span its lane and the first row of that lane on which it nests or stands free."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start, -spans[i].end))
    open_ends: dict[int, list[list[float]]] = {}
    rows = [(0, 0)] * len(spans)
    for index in order:
        span = spans[index]
        lane_rows = open_ends.setdefault(span.lane, [])
        row = _free_row(lane_rows, span)
        if row == len(lane_rows):
            lane_rows.append([])
        lane_rows[row].append(span.end)
        rows[index] = span.lane, row
    return rows


def _free_row(lane_rows: Sequence[list[float]], span: Span) -> int:
    """The first row whose innermost open span has ended or outlives `span`."""
    for row, open_ends in enumerate(lane_rows):
        while open_ends and open_ends[-1] <= span.start:
            open_ends.pop()
        if not open_ends or span.end <= open_ends[-1]:
            return row
    return len(lane_rows)


def _thread_events(name: str, thread: int, lane: int | None) -> list[dict[str, Any]]:
    return [
        _metadata("thread_name", thread, name=name, lane=lane),
        _metadata("thread_sort_index", thread, sort_index=thread),
    ]


def _metadata(event: str, thread: int, **args: object) -> dict[str, Any]:
    return {"name": event, "ph": "M", "pid": PROCESS, "tid": thread, "args": args}


def _event(span: Span, thread: int, origin: float, step: int) -> dict[str, Any]:
    args: dict[str, object] = dict(span.args)
    if "step" in args:  # of the engine, which counts from 0, and may run steps beside others
        args["engine_step"] = args["step"]
    args["step"] = step
    # Both ends are rounded, and not the duration, so that neighbours still meet exactly.
    begin, end = round((span.start - origin) * 1e6, 3), round((span.end - origin) * 1e6, 3)
    return {
        "name": span.name,
        "cat": span.kind,
        "ph": "X",
        "pid": PROCESS,
        "tid": thread,
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": args,
    }


def _span(event: Mapping[str, Any], lane: int) -> tuple[int, dict[str, Any]]:
    """The step of an event, and the fields of its span."""
    start = event["ts"] / 1e6
    args = {key: value for key, value in event["args"].items() if key != "step"}
    if "engine_step" in args:
        args["step"] = args.pop("engine_step")
    fields = {"lane": lane, "name": event["name"], "kind": event["cat"], "args": args}
    return event["args"]["step"], {**fields, "start": start, "end": start + event["dur"] / 1e6}
