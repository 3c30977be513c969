"""Facts of recorded spans, and how long the commands behind them were on their way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from m2flow.engine.facts import ids_of
from m2flow.engine.messages import (
    ExportWeights,
    InstallWeights,
    LaneCommand,
    RunCall,
    RunFinish,
)
from m2flow.engine.spans import Span
from m2flow.flow.graph import StageNode
from m2flow.plan.measured import Observed

SAME_MOMENT = 2e-3
"""Seconds between the end of a transfer and the start of the call that it was for, at most."""

CommandKey = tuple[object, ...]
"""What a command was to do, in a recorded step."""


def dispatches(
    recorded: Observed, nodes: Mapping[str, StageNode]
) -> tuple[float, dict[CommandKey, float]]:
    """How long commands were on their way: the mean, and each, as far as moments before it tell.

    What caused it is not later than the last thing that happened on any lane; where that was the
    end of the lane's own work, it was the cause.
    """
    moments = sorted(
        [span.end for span in recorded.spans if span.kind != "transfer"]
        + [span.start + float(row[0]) for span in recorded.spans for row in rows(span, "pieces")]
        + [started for started, _ in recorded.steps]
    )
    ended: dict[int, float] = {}
    waiting: dict[int, Span] = {}
    sure: list[float] = []
    each: dict[CommandKey, float] = {}
    for span in sorted(recorded.spans, key=lambda span: span.start):
        if span.kind == "transfer":
            waiting[span.lane] = span
            continue
        brought, start = waiting.pop(span.lane, None), span.start
        if brought is not None and 0 <= start - brought.end < SAME_MOMENT:
            start = brought.start
        key, before = _span_key(span, nodes), bisect_right(moments, start)
        if key is not None and before:
            gap = start - moments[before - 1]
            each[key] = max(gap, each.get(key, 0.0))
            if span.kind == "call" and ended.get(span.lane) == moments[before - 1]:
                sure.append(gap)
        ended[span.lane] = span.end
    if not sure:
        return 0.0, {}
    quick = sorted(sure)[len(sure) // 4]
    return fmean(sure), {key: max(gap, quick) for key, gap in each.items()}


def _span_key(span: Span, nodes: Mapping[str, StageNode]) -> CommandKey | None:
    step = int(number(span, "step"))
    if span.kind == "call" and span.name in nodes and (items := ids(span)):
        return ("call", nodes[span.name].index, step, items[0])
    if span.kind == "finish" and span.name in nodes:
        return ("finish", nodes[span.name].index, step, int(number(span, "minibatch")))
    if span.kind == "publish":
        return ("publish", span.name, int(number(span, "version")), span.lane)
    return None


def command_key(command: LaneCommand, step: Callable[[int], int]) -> CommandKey | None:
    """Under what `dispatches` knows a command; `step` gives the recorded step of one."""
    match command:
        case RunCall(node=node, inputs=inputs):
            items = [item for part in inputs[0][0] for item in part.items] if inputs[0] else []
            return ("call", node, step(command.step), items[0]) if items else None
        case RunFinish(node=node):
            return ("finish", node, step(command.step), command.minibatch)
        case ExportWeights(source=worker) | InstallWeights(target=worker):
            return ("publish", worker, step(command.version - 1) + 1, command.lanes[0])
    return None


def ids(span: Span) -> tuple[int, ...]:
    """The items of a call."""
    return ids_of(str(span.args.get("ids", "")))


def number(span: Span, name: str) -> float:
    """A number that a span tells; 0 where it does not."""
    value = span.args.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def rows(span: Span, name: str) -> list[Any]:
    """Rows that a span tells; none where it does not."""
    told = span.args.get(name, [])
    return told if isinstance(told, list) else []
