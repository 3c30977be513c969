"""What every item of a recorded run took: the spans taken apart by stage, step and item.

Calls are divided among their items, after the least price of a call that the others show. In a
streaming call each output item has grown, while it was at work, by one unit in as many seconds as
the stage's pace says for the number at work: played again, the same call takes the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from m2flow.engine.facts import ids_of
from m2flow.engine.spans import Span
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.measured import Observed
from m2flow.plan.replay_spans import SAME_MOMENT, CommandKey, dispatches, ids, number, rows

Key = tuple[int, int, int]
"""(stage, step, item)."""

Pace = Callable[[StageNode, int], float]
"""Seconds of a unit of growth, by stage and output items at work."""


@dataclass
class Record:
    """A run, taken apart. Steps have the numbers that they had in the run.

    Attributes:
        numbers: of the steps, in order.
        least: the price of a call of a stage with no item.
        seconds: of an item in a call, beyond that; in a loop, for each of its turns.
        needs: units by which an output item of a streaming stage grows.
        finishes: seconds by (stage, step, mini-batch).
        installs: seconds by (source, target, version, lane) and whether the source stood there.
        exports: seconds by (source, version).
        transfers: seconds of one item brought for a call, by (reading stage, step, item).
        dispatch: mean seconds from a lane's end to its next call, where nothing else caused it.
        dispatches: of single commands (`command_key`), seconds from whatever happened last on any
            lane; not less than the quick ones among those above.
        visits: by (loop, step, item), how often members of the loop have worked on it.
        before: seconds of each step until its first call began.
        after: seconds of each step from the end of the last call on.
    """

    numbers: list[int]
    least: dict[int, float] = field(default_factory=dict)
    seconds: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    needs: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    finishes: dict[tuple[int, int, int], float] = field(default_factory=dict)
    installs: dict[tuple[str, str, int, int], tuple[float, bool]] = field(default_factory=dict)
    exports: dict[tuple[str, int], float] = field(default_factory=dict)
    transfers: dict[Key, float] = field(default_factory=dict)
    dispatch: float = 0.0
    dispatches: dict[CommandKey, float] = field(default_factory=dict)
    visits: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


def taken_apart(graph: FlowGraph, recorded: Observed, pace: Pace) -> Record:
    """The items' part in each span.

    Args:
        graph: of the steps.
        recorded: whole steps.
        pace: of streaming stages.

    Raises:
        UserError: the spans do not say which items they were of.
    """
    record = Record(_numbers(graph, recorded))
    nodes = {node.name: node for node in graph.nodes}
    calls = [span for span in recorded.spans if span.kind == "call" and span.name in nodes]
    if not any("ids" in span.args for span in calls):
        raise UserError(
            "the timeline does not say which items its calls were of",
            key="timeline.json",
            hint="it was written by an earlier version: record the run again",
        )
    by_stage = groupby(sorted(calls, key=lambda span: span.name), key=lambda span: span.name)
    for name, spans in by_stage:
        node = nodes[name]
        if node.streaming:
            for span in spans:
                _add_stream(record, node, span, pace)
        else:
            _add_calls(record, node, list(spans))
    for span in recorded.spans:
        _add_other(record, nodes, span)
    _add_transfers(record, nodes, recorded.spans)
    record.dispatch, record.dispatches = dispatches(recorded, nodes)
    for started, seconds in recorded.steps:
        within = [s for s in recorded.spans if started <= s.start and s.end <= started + seconds]
        first = min((span.start for span in within), default=started)
        last = max((span.end for span in within), default=started + seconds)
        record.before.append(first - started)
        record.after.append(started + seconds - last)
    return record


def _numbers(graph: FlowGraph, recorded: Observed) -> list[int]:
    """The number of each step: that of the last call of the flow's output before its end."""
    outputs = {graph.nodes[index].name for index in graph.output_nodes}
    ends = sorted(
        (span.end, int(number(span, "step")))
        for span in recorded.spans
        if span.name in outputs and span.kind in ("call", "finish")
    )
    numbers = []
    for started, seconds in recorded.steps:
        before = [step for end, step in ends if end <= started + seconds + 1e-6]
        if before:
            numbers.append(max(before))
    if len(set(numbers)) != len(recorded.steps):
        raise UserError(
            "the timeline does not hold whole steps", key="timeline.json", value=numbers
        )
    return numbers


def _add_calls(record: Record, node: StageNode, spans: Sequence[Span]) -> None:
    """Divide the calls of a stage among their items."""
    calls = [
        (
            [item for span in some for item in ids(span)],
            int(number(some[0], "step")),
            max(span.seconds for span in some),
        )
        for some in _by_call(sorted(spans, key=lambda span: span.start))
    ]
    calls = [call for call in calls if call[0]]
    least = _least([(len(items), spent) for items, _, spent in calls])
    record.least[node.index] = least
    for items, step, spent in calls:
        for item in items:
            record.seconds[node.index, step, item].append((spent - least) / len(items))
            if node.loop is not None:
                record.visits[node.loop, step, item] += 1


def _least(calls: Sequence[tuple[int, float]]) -> float:
    """The price of a call with no item, by a line through calls of different sizes (0 if none)."""
    calls = [(items, spent) for items, spent in calls if spent > 0]
    if len({items for items, _ in calls}) < 2:
        return 0.0
    weights = [spent**-2 for _, spent in calls]
    whole = sum(weights)
    x = sum(w * items for w, (items, _) in zip(weights, calls, strict=True)) / whole
    y = sum(w * spent for w, (_, spent) in zip(weights, calls, strict=True)) / whole
    both = [(w, items - x, spent - y) for w, (items, spent) in zip(weights, calls, strict=True)]
    slope = sum(w * dx * dy for w, dx, dy in both) / sum(w * dx * dx for w, dx, _ in both)
    return min(max(0.0, y - slope * x), *(spent for _, spent in calls))


def _by_call(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans of each call: one for each lane of a gang; those of a fused loop have none."""
    calls: dict[object, list[Span]] = {}
    for place, span in enumerate(spans):
        call = span.args.get("call")
        key = ("alone", place) if call is None else (span.args.get("step"), call)
        calls.setdefault(key, []).append(span)
    return list(calls.values())


def _add_stream(record: Record, node: StageNode, span: Span, pace: Pace) -> None:
    """Let the items of a streaming call grow as they did, and note by how much."""
    step = int(number(span, "step"))
    moments = _moments(node, span)
    at_work: dict[int, float] = {}
    grown = now = 0.0
    for when, what, outputs in moments:
        if at_work:
            grown += (when - now) / pace(node, len(at_work))
        now = when
        for output in outputs:
            if what == "come":
                at_work[output] = grown
            elif output in at_work:
                record.needs[node.index, step, output] += grown - at_work.pop(output)


def _moments(node: StageNode, span: Span) -> list[tuple[float, str, tuple[int, ...]]]:
    """When output items came to a streaming call, and when they left it, in order of time.

    The last ones leave at the end of the call.
    """
    moments: list[tuple[float, str, tuple[int, ...]]] = []
    for when, items in rows(span, "taken"):
        n = node.expands
        outputs = tuple(item * n + k for item in ids_of(items) for k in range(n))
        moments.append((when, "come", outputs))
    moments += [(when, "come", ids_of(items)) for when, items in rows(span, "resumed")]
    leaving = [(when, "leave", ids_of(items)) for when, items, *_ in rows(span, "pieces")]
    back = span.args.get("given_back")
    if isinstance(back, list) and back:
        leaving.append((float(back[0]), "leave", ids_of(back[1])))
    if leaving:
        leaving.sort(key=lambda moment: moment[0])
        leaving[-1] = (max(leaving[-1][0], span.seconds), *leaving[-1][1:])
    # What comes at the moment at which others leave was fed because of them.
    return sorted(moments + leaving, key=lambda moment: (moment[0], moment[1] == "come"))


def _add_other(record: Record, nodes: Mapping[str, StageNode], span: Span) -> None:
    if span.kind == "finish" and span.name in nodes:
        at = (int(number(span, "step")), int(number(span, "minibatch")))
        key = (nodes[span.name].index, *at)
        record.finishes[key] = max(record.finishes.get(key, 0.0), span.seconds)
    elif span.kind == "publish":
        version, source = int(number(span, "version")), str(span.args.get("source", span.name))
        if span.args.get("what") == "export":
            known = record.exports.get((source, version), 0.0)
            record.exports[source, version] = max(known, span.seconds)
        else:
            local = bool(span.args.get("local"))
            record.installs[source, span.name, version, span.lane] = (span.seconds, local)


def _add_transfers(record: Record, nodes: Mapping[str, StageNode], spans: Iterable[Span]) -> None:
    """Divide each transfer among the items of the call that it was for: the next on its lane."""
    waiting: dict[int, Span] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind == "transfer":
            waiting[span.lane] = span
        elif span.kind == "call" and span.name in nodes:
            brought = waiting.pop(span.lane, None)
            if brought is None or not 0 <= span.start - brought.end < SAME_MOMENT:
                continue
            each = brought.seconds / max(1.0, number(brought, "items"))
            at = (nodes[span.name].index, int(number(span, "step")))
            record.transfers.update({(*at, item): each for item in ids(span)})
