"""What bounds a predicted step: the chain of work from its end back to its start.

The chain goes from the last thing that ended to what it had to wait for: what kept its lane busy
until then, else what ended elsewhere at that moment, else a streaming call that still runs and had
just handed something on. What is left between is waiting. Its seconds add up to the step's.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from m2flow.engine.spans import Span
from m2flow.flow.graph import SOURCE, FlowGraph
from m2flow.plan.explaining.rows import Work, lane_names
from m2flow.plan.explaining.seconds import brief
from m2flow.plan.prediction import Candidate

NEAR = 0.005
"""What starts on a lane within this share of the step after its last work had to wait for that."""

LOOKED_BACK = 8
"""Of a lane's spans so many may lie on one another: calls that are fed, moves beside calls."""

FULL = 0.1
"""A lane that is idle for less than this share has no time left."""

WORK = ("call", "finish")
"""Kinds of spans that are work of a stage."""

TERMS = {"switch": "switching", "publish": "publishing", "transfer": "links", "wait": "waiting"}
"""What the kinds of spans that are no work count for."""


@dataclass(frozen=True)
class Segment:
    """A part of the chain: what a lane did (None: nobody did anything), in seconds."""

    work: Work | None
    lane: int | None
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def term(self) -> str:
        """The stage, or "switching", "publishing", "links", "waiting"."""
        return "waiting" if self.work is None else TERMS.get(self.work[0], self.work[1])


@dataclass(frozen=True)
class Bottleneck:
    """What takes most of the chain.

    Attributes:
        what: a stage, or "switching", "publishing", "links", "waiting".
        lanes: on which it stands in the chain.
        seconds: of the chain.
        share: of the step.
        why: a sentence.
        path: all of the chain by what, most first.
    """

    what: str
    lanes: tuple[int, ...]
    seconds: float
    share: float
    why: str
    path: Mapping[str, float]


class _Spans:
    """Spans by their ends, by lane and by what they are, for looking back from a moment."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.ordered = sorted((s for s in spans if s.end > s.start), key=lambda s: s.end)
        self._ends = [span.end for span in self.ordered]
        self._named: dict[tuple[str, bool], list[Span]] = {}
        self._lanes: dict[int, list[Span]] = {}
        for span in self.ordered:
            self._named.setdefault((span.name, span.kind in WORK), []).append(span)
        for span in sorted(self.ordered, key=lambda span: span.start):
            self._lanes.setdefault(span.lane, []).append(span)

    def ended_at(self, moment: float, slack: float) -> list[Span]:
        """What ended then."""
        low = bisect_left(self._ends, moment - slack)
        high = bisect_right(self._ends, moment + slack)
        return [span for span in self.ordered[low:high] if span.start < moment - slack]

    @property
    def seconds(self) -> float:
        """Until the last end."""
        return self._ends[-1]

    def last_on(self, lane: int, moment: float) -> Span | None:
        """The last span of a lane that had ended."""
        own = self._lanes.get(lane, [])
        at = bisect_left(own, moment, key=lambda span: span.start)
        earlier = (span for span in own[max(0, at - LOOKED_BACK) : at] if span.end <= moment)
        return max(earlier, key=lambda span: span.end, default=None)

    def ended_before(self, moment: float, stages: Collection[str]) -> Span | None:
        """The last span of some stages that had ended."""
        found = []
        for stage in stages:
            own = self._named.get((stage, True), [])
            at = bisect_right(own, moment, key=lambda span: span.end)
            found += own[at - 1 : at]
        return max(found, key=lambda span: span.end, default=None)

    def running_at(self, moment: float, stages: Collection[str]) -> Span | None:
        """A call of one of these stages that was going on, the one that began first."""
        found = []
        for own in self._lanes.values():
            at = bisect_left(own, moment, key=lambda span: span.start)
            found += [
                span
                for span in own[max(0, at - LOOKED_BACK) : at]
                if span.end > moment and span.name in stages and span.kind == "call"
            ]
        return min(found, key=lambda span: span.start, default=None)


def chain(spans: Sequence[Span], graph: FlowGraph) -> list[Segment]:
    """The chain of a step's spans, from its start to its end."""
    known = _Spans(spans)
    if not known.ordered:
        return []
    causes = _causes(graph)
    current = known.ordered[-1]
    moment, found = current.end, list[Segment]()
    slack = 1e-9 * max(1.0, moment)
    reader = current.name
    while True:
        start = min(max(0.0, current.start), moment)
        found.append(Segment((current.kind, current.name), current.lane, start, moment))
        moment = start
        # What moves items or states does so for the call that it is followed by.
        reader = current.name if current.kind in (*WORK, "publish") else reader
        makers = {reader} if current.kind == "finish" else causes.get(reader, set())
        before = _before(known, current.lane, moment, slack, makers) if moment > slack else None
        if before is None:
            break
        if before.end < moment - slack:
            found.append(Segment(None, None, before.end, moment))
        current, moment = before, min(before.end, moment)
    if moment > slack:
        found.append(Segment(None, None, 0.0, moment))
    return found[::-1]


def _causes(graph: FlowGraph) -> dict[str, set[str]]:
    """For a stage those that make its inputs; for a worker, whose weights travel, its stages."""
    causes = {worker: set[str]() for worker in graph.workers}
    for node in graph.nodes:
        causes[node.worker].add(node.name)
    for node in graph.nodes:
        causes[node.name] = {graph.nodes[n].name for n in node.inputs if n != SOURCE}
    for edge in graph.weight_edges:
        causes[edge.target] = causes.get(edge.target, set()) | causes.get(edge.source, set())
    return causes


def _before(
    known: _Spans, lane: int, moment: float, slack: float, makers: Collection[str]
) -> Span | None:
    """What had to be there before a lane could go on; None if nothing had.

    Args:
        known: all spans.
        lane: which one.
        moment: when it went on.
        slack: how close two moments are that count as one.
        makers: stages whose items or weights it needed.
    """
    ended = known.ended_at(moment, slack)
    own = [span for span in ended if span.lane == lane]
    if own or ended:
        return max(own or ended, key=lambda span: span.seconds)
    last = known.last_on(lane, moment)
    if last is not None and moment - last.end <= NEAR * known.seconds:
        return last  # its lane had been busy, and a command was on its way
    feeding = known.running_at(moment, makers)
    if feeding is not None:
        return feeding
    made = known.ended_before(moment, makers)
    return max(filter(None, (made, last)), key=lambda span: span.end, default=None)


def path_seconds(segments: Sequence[Segment]) -> dict[str, float]:
    """Seconds of the chain by what they are spent on, most first."""
    found: dict[str, float] = {}
    for segment in segments:
        found[segment.term] = found.get(segment.term, 0.0) + segment.seconds
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def bottleneck(candidate: Candidate, graph: FlowGraph) -> Bottleneck | None:
    """What bounds the step of a candidate; None if its prediction has no spans."""
    prediction = candidate.prediction
    segments = chain(prediction.spans, graph)
    if not segments:
        return None
    spent = path_seconds(segments)
    what, seconds = next(iter(spent.items()))
    whole = sum(spent.values())
    lanes = tuple(sorted({s.lane for s in segments if s.term == what and s.lane is not None}))
    why = _why(candidate, graph, what, lanes)
    return Bottleneck(what, lanes, seconds, seconds / whole, why, spent)


def _why(candidate: Candidate, graph: FlowGraph, what: str, lanes: Sequence[int]) -> str:
    prediction = candidate.prediction
    fullest = min(prediction.idle, key=lambda lane: prediction.idle[lane], default=None)
    reasons = []
    if what in {node.name for node in graph.nodes}:
        tail = _tail(prediction.spans, what)
        if tail is not None:
            reasons.append(
                f"the last {brief(tail)} of it run on at most half of its lanes: the longest items"
            )
    elif what == "waiting":
        reasons.append("in most of the step some lane waits for a command or for items of another")
    else:
        reasons.append(f"{what} stands between the stages on {lane_names(lanes)}")
    if fullest is not None and prediction.idle[fullest] < FULL:
        full = [lane for lane, idle in prediction.idle.items() if idle < FULL]
        everybody = len(full) == len(prediction.idle)
        have = "have" if len(full) > 1 else "has"
        which = "no lane has" if everybody else f"{lane_names(full)} {have} no"
        reasons.append(f"{which} time left")
    elif fullest is not None:
        reasons.append(
            f"no lane works throughout (the fullest is idle for {prediction.idle[fullest]:.0%}): "
            "stages wait for each other"
        )
    return "; ".join(reasons)


def _tail(spans: Sequence[Span], stage: str) -> float | None:
    """Seconds in which at most half of a stage's lanes still run it, if they are many."""
    ends: dict[int, float] = {}
    for span in spans:
        if (span.kind, span.name) == ("call", stage):
            ends[span.lane] = max(ends.get(span.lane, 0.0), span.end)
    starts = [span.start for span in spans if (span.kind, span.name) == ("call", stage)]
    if len(ends) < 2:
        return None
    ordered = sorted(ends.values())
    half = ordered[math.ceil(len(ordered) / 2) - 1]
    tail, whole = ordered[-1] - half, ordered[-1] - min(starts)
    return tail if tail > 0.1 * whole else None
