"""`Evidence`: the single measurements in the spans of steps that ran, under any plan.

Spans are taken apart: calls by replica, streaming calls piece by piece, `finish`, publishing,
transfers, moves of state, memory, and what a call costs beside its lane. Of each sort the newest
are kept. Nothing is judged here: fitting is done elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span, SpanKind, ids_of
from m2flow.flow.graph import FlowGraph
from m2flow.plan.profile import NO_TIME, PublishCost

NEWEST, OF_ONE_SIZE = 256, 48
"""So many measurements of each sort are kept, and of calls so many of each size."""

SAME_MOMENT = 2e-3
"""Seconds between the end of a transfer and the start of the call that it was for, at most."""

COLD = "cold "
CALLS = ("call", "fed", COLD + "call", COLD + "fed")
"""Names of what was measured of calls, the best of them first; see `Evidence.samples`."""

HARDLY = 1.1
"""What took at most so many times the longest warm call of its size was no cold one."""

Where: TypeAlias = tuple[str, str, int, str]
"""A stage or worker, the name of its layout, lanes of a replica, kind of lane."""


class Step(Protocol):
    """A step that ran: what its lanes did, and when it was submitted on their clock."""

    @property
    def spans(self) -> Sequence[Span]: ...
    @property
    def started(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        size: items of a replica, bytes, or replicas.
        seconds: until the end; for memory, bytes.
        pieces: of a streaming call whose items came together, when it handed items on, which, and
            the length of each (empty where there are none).
    """

    size: float
    seconds: float
    pieces: tuple[tuple[float, tuple[int, ...], tuple[float, ...]], ...] = ()

    @property
    def outputs(self) -> int:
        """Count the items handed on."""
        return sum(len(items) for _, items, _ in self.pieces)


class Evidence:
    """Measurements of a flow as they come in, step by step.

    Args:
        graph: of the steps.

    Attributes:
        samples: by what was measured, stage or worker with its layout, and size. What was measured
            is a "call"; one that was "fed" items while it ran; a "finish", by number of replicas;
            each of these as "cold call" and so on where no other was seen in steps that were to
            warm the lanes up; bytes on a lane that a call was "working" with beside the state (a
            `finish` counts as a call of 0 items); an "onload" or an "offload", of size 0.
        states: bytes on a lane by worker and layout.
        publishes: seconds by what is priced, as a `PublishCost` without a price.
        transfers: (parts, bytes, seconds) of what was fetched from lanes of one machine for a call;
            each part lies on one lane.
        gaps: (events of other lanes shortly before, seconds) from a lane's end to its next call,
            where nothing else can have caused that call; of steps on one machine.
        worked: seconds of lanes in all warm calls, and in each `finish`, of stages that have one.
        output_bytes: (items, bytes) by stage.
        lengths: of output items, by stage.
        turns: of items in a loop, by its first stage.
        elsewhere: of a stage that waits, shares of its calls that passed elsewhere. Calls during
            which other groups had their turns tell neither this nor how long they took.
    """

    def __init__(self, graph: FlowGraph) -> None:
        self.graph = graph
        self._nodes = {node.name: node for node in graph.nodes}
        self.samples: dict[tuple[str, Where, float], deque[Sample]] = _newest(OF_ONE_SIZE)
        self.states: dict[Where, int] = {}
        self.publishes: dict[PublishCost, deque[float]] = _newest(NEWEST)
        self.transfers: deque[tuple[float, float, float]] = deque(maxlen=NEWEST)
        self.gaps: deque[tuple[int, float]] = deque(maxlen=NEWEST)
        self.worked: dict[tuple[Where, str], float] = defaultdict(float)
        self.output_bytes: dict[str, deque[tuple[float, float]]] = _newest(NEWEST)
        self.lengths: dict[str, deque[float]] = _newest(16 * NEWEST)
        self.turns: dict[str, deque[float]] = _newest(16 * NEWEST)
        self.elsewhere: dict[Where, deque[float]] = _newest(NEWEST)

    def add(
        self,
        plan: Plan,
        steps: Iterable[Step],
        *,
        warm: bool = True,
        moves: Iterable[tuple[str, str, float]] = (),
        gauged: Sequence[Span] = (),
    ) -> None:
        """Take in steps that ran under one plan.

        Args:
            plan: with the sizes of the workers' states, where they are known.
            steps: one after the other.
            warm: whether steps before these have warmed the lanes up. If not, the first call of
                each stage on each lane is a cold one.
            moves: (worker, "onload" or "offload", seconds) of moves that were made beside them.
            gauged: spans of a step that say what calls took of memory; their seconds do not count.
        """
        steps, placed = list(steps), _PlanLayouts(plan)
        spans = [span for step in steps for span in step.spans]
        timed = _timed(spans)
        counted = timed if warm else list(_without_first(timed))
        known = {(span.name, span.kind) for span in counted}
        cold = [one for one in timed if (one.name, one.kind) not in known]
        for how, alike in (("", counted), (COLD, cold)):
            for some in _together(alike, "call", "call"):
                self._add_call(some, placed, how)
            for some in _together(alike, "finish", "step", "minibatch"):
                worker = self._nodes[some[0].name].worker
                where = placed.of(worker, some[0].lane, some[0].name)
                seconds = max(span.seconds for span in some)
                replicas = len(plan.placements[worker].replicas)
                self._keep(how + "finish", where, Sample(replicas, seconds))
        for span in counted:
            node = self._nodes.get(span.name)
            if node is not None and node.has_finish and span.kind in ("call", "finish"):
                self.worked[placed.of(node.worker, span.lane, node.name), span.kind] += span.seconds
        counted = [*counted, *cold]
        self._add_publishes([span for span in counted if span.kind == "publish"], placed)
        self._add_memory(gauged, placed)
        self._add_items(spans)
        for span in counted:
            if "bytes" in span.args and span.kind == "transfer" and placed.on_one_machine:
                sizes = _number(span, "parts"), _number(span, "bytes")
                self.transfers.append((*sizes, span.seconds))
            elif span.kind == "switch" and "what" in span.args:
                worker = str(span.args.get("worker", span.name))
                self._keep(str(span.args["what"]), placed.of(worker), Sample(0, span.seconds))
        for worker, what, seconds in moves:
            self._keep(what, placed.of(worker), Sample(0, seconds))
        for worker, spot in plan.placements.items():
            if spot.state_bytes:
                where = placed.of(worker)
                self.states[where] = max(self.states.get(where, 0), spot.state_bytes)
        if placed.on_one_machine:  # clocks of several differ by more than a gap
            self.gaps.extend(_gaps(timed, [step.started for step in steps]))

    def of(self, what: str, where: Where) -> list[Sample]:
        """Return what was measured of a stage or worker in a layout."""
        kept = (some for (*key, _), some in self.samples.items() if key == [what, where])
        return [sample for some in kept for sample in some]

    def timed(self, stage: str) -> dict[Where, list[Sample]]:
        """Return a stage's calls by layout: fed ones only where there are no others, and cold ones
        only where there are no warm ones, or where they took hardly longer than these.

        A fed call took at least as long as one that is given all its items at once.
        """
        found = {where for what, where, _ in self.samples if what in CALLS}
        return {
            where: self._usual("call", where)
            or next(filter(None, (self.of(what, where) for what in CALLS)))
            for where in sorted(found)
            if where[0] == stage
        }

    def finishes(self, where: Where) -> list[Sample]:
        """Return what the `finish` of a stage took in a layout; cold ones as for `timed`."""
        return self._usual("finish", where) or self.of(COLD + "finish", where)

    def _usual(self, what: str, where: Where) -> list[Sample]:
        """Return what was measured warm, and what was measured cold and took hardly longer."""
        warm, longest = self.of(what, where), dict[float, float]()
        for one in warm:
            longest[one.size] = max(one.seconds, longest.get(one.size, 0.0))
        cold = self.of(COLD + what, where)
        return [*warm, *(x for x in cold if x.seconds <= HARDLY * longest.get(x.size, 0.0))]

    def _keep(self, what: str, where: Where, sample: Sample) -> None:
        self.samples[what, where, sample.size].append(sample)

    def _add_call(self, spans: Sequence[Span], placed: _PlanLayouts, how: str) -> None:
        node = self._nodes.get(spans[0].name)
        if node is None:
            return
        where = placed.of(node.worker, spans[0].lane, node.name)
        items = sum(_number(span, "items") for span in spans)
        longest = max(spans, key=lambda span: ("taken" in span.args, span.seconds))
        call = Sample(items, longest.seconds)
        if not items or _number(longest, "groups") > 1:
            return
        if "groups" in longest.args and longest.seconds > 0:
            share = 1.0 - _number(longest, "busy") / longest.seconds
            self.elsewhere[where].append(max(share, 0.0))
        if not node.streaming:
            self._keep(how + "call", where, call)
        elif len(_listed(longest, "taken")) > 1:
            self._keep(how + "fed", where, call)
        else:
            pieces = tuple(
                (float(when), ids_of(str(ids)), tuple(map(float, lengths)))
                for when, ids, lengths in _listed(longest, "pieces")
            )
            if not pieces or sum(len(ids) for _, ids, _ in pieces) == items * node.expands:
                self._keep(how + "call", where, replace(call, pieces=pieces))

    def _add_publishes(self, spans: Sequence[Span], placed: _PlanLayouts) -> None:
        """Add a whole transfer: the longest export and, after it, the longest install."""
        exports: dict[Hashable, float] = {}
        installs: dict[tuple[str, str, object, str], float] = {}
        targets = {edge.target for edge in self.graph.weight_edges}
        for span in spans:
            source, version = str(span.args.get("source", span.name)), span.args.get("version")
            if span.args.get("what") == "export":
                exports[source, version] = max(exports.get((source, version), 0.0), span.seconds)
            elif span.name in targets:
                place = "same" if span.args.get("local") else placed.place(source, span.lane)
                key = (source, span.name, version, place)
                installs[key] = max(installs.get(key, 0.0), span.seconds)
        for (source, target, version, place), seconds in installs.items():
            if place != "same":
                seconds += exports.get((source, version), 0.0)
            ours, theirs = placed.of(source), placed.of(target)
            ends = PublishCost(
                source, target, place, NO_TIME, ours[2], theirs[2], ours[3], theirs[3]
            )
            self.publishes[ends].append(seconds)

    def _add_memory(self, spans: Sequence[Span], placed: _PlanLayouts) -> None:
        gauged = [span for span in spans if "working_bytes" in span.args]
        for some in (*_together(gauged, "call", "call"), *_together(gauged, "finish", "call")):
            first, most = some[0], max(_number(span, "working_bytes") for span in some)
            where = placed.of(self._nodes[first.name].worker, first.lane, first.name)
            items = sum(_number(span, "items") for span in some)
            at_once = items and all(len(_listed(span, "taken")) <= 1 for span in some)
            if first.kind == "finish" or at_once:
                self._keep("working", where, Sample(items * (first.kind == "call"), most))

    def _add_items(self, spans: Sequence[Span]) -> None:
        """Add what items weigh, how long they are, and how often they go around their loop."""
        firsts = {self.graph.nodes[loop.members[0]].name for loop in self.graph.loops}
        visits: dict[tuple[str, object], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for span in spans:
            node = self._nodes.get(span.name)
            if span.kind == "call" and node is not None and "bytes" in span.args:
                items = _number(span, "items") * node.expands
                self.output_bytes[span.name].append((items, _number(span, "bytes")))
            if span.kind == "call" and span.name in firsts:
                for item in ids_of(str(span.args.get("ids", ""))):
                    visits[span.name, span.args.get("step")][item] += 1
            for _, _, lengths in _listed(span, "pieces"):
                self.lengths[span.name].extend(map(float, lengths))
        for (name, _), counts in visits.items():
            self.turns[name].extend(map(float, counts.values()))


class _PlanLayouts:
    """How a plan lays workers out."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._lanes = plan, {lane.id: lane for lane in plan.lanes}
        self.on_one_machine = len({lane.node for lane in plan.lanes}) == 1

    def of(self, worker: str, lane: int | None = None, stage: str | None = None) -> Where:
        """Return the layout of a worker, with the kind of a lane or of the first replica's."""
        spot = self._plan.placements[worker]
        gang = spot.replicas[0]
        kind = self._lanes[gang[0] if lane is None else lane].kind
        return stage or worker, spot.layout, len(gang), kind

    def place(self, source: str, lane: int) -> str:
        """Say how far a lane is from the first replica of a worker on another one."""
        nodes = {self._lanes[x].node for x in self._plan.placements[source].replicas[0]}
        return "node" if nodes == {self._lanes[lane].node} else "cluster"


def _gaps(spans: Sequence[Span], started: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield what passes between a lane's end and its next call, where nothing else caused the call.

    That end was the last thing that happened on any lane before the call. Counted are the things
    that other lanes reported within as many seconds before that end: the controller had to handle
    these first.
    """
    moments = sorted(
        [span.end for span in spans]
        + [span.start + float(piece[0]) for span in spans for piece in _listed(span, "pieces")]
        + list(started)
    )
    for lane in {span.lane for span in spans}:
        before: Span | None = None
        brought: Span | None = None
        for span in sorted((one for one in spans if one.lane == lane), key=lambda one: one.start):
            if span.kind == "transfer":
                brought = span
                continue
            start = span.start
            if brought is not None and start - brought.end < SAME_MOMENT:
                start = brought.start
            last = moments[bisect_right(moments, start) - 1]
            if before is not None and "call" in span.args and last == before.end:
                earlier = bisect_left(moments, last) - bisect_left(moments, 2 * last - start)
                yield earlier, start - last
            before, brought = span, None


def _newest(count: int) -> Any:
    """Return a mapping to lists that keep so many entries, the newest."""
    return defaultdict(lambda: deque(maxlen=count))


def _number(span: Span, name: str) -> float:
    value = span.args.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _listed(span: Span, name: str) -> list[Any]:
    value = span.args.get(name, [])
    return value if isinstance(value, list) else []


def _timed(spans: Sequence[Span]) -> list[Span]:
    """Return the spans less those of calls in which a lane's clock was set back."""
    set_back = {
        (span.name, span.args.get("call"))
        for span in spans
        if span.seconds < 0 or any(float(piece[0]) < 0 for piece in _listed(span, "pieces"))
    }
    return [span for span in spans if (span.name, span.args.get("call")) not in set_back]


def _without_first(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield all spans but the first of each sort on each lane."""
    seen = set()
    for span in sorted(spans, key=lambda one: one.start):
        what = (span.lane, span.name, span.kind)
        if what in seen:
            yield span
        seen.add(what)


def _together(spans: Iterable[Span], kind: SpanKind, *keys: str) -> Iterator[list[Span]]:
    """Yield the spans of a kind that belong together: one for each lane, with the same keys."""
    found: dict[tuple[object, ...], list[Span]] = defaultdict(list)
    for number, span in enumerate(spans):
        if span.kind == kind:
            alone = number if keys[0] not in span.args else None
            found[(span.name, alone, *map(span.args.get, keys))].append(span)
    yield from found.values()
