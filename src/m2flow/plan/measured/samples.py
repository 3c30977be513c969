"""`Samples`: the single measurements in what was seen of real steps.

Spans are taken apart: calls by replica, streaming calls piece by piece, `finish`, publishing,
transfers, moves of state, memory, and the time from a lane's end to its next call. It judges
nothing: fitting is done elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from m2flow.engine.facts import ids_of
from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.busy import BusyLanes
from m2flow.plan.measured.gaps import gaps, pieces_of
from m2flow.plan.measured.observed import Call, Observed
from m2flow.plan.measured.resuming import (
    Resumed,
    came_apart,
    changed_lanes,
    grown_of,
    resumed,
)

Sizes: TypeAlias = list[tuple[float, float]]
"""Measurements: (size, seconds)."""

LayoutKey: TypeAlias = tuple[str, int, str]
"""A stage or worker, lanes of a replica, kind of lane."""


def _lists() -> Any:
    return defaultdict(list)


@dataclass
class Samples:
    """Single measurements.

    Attributes:
        calls: by stage and layout; of streaming ones those whose items all came together and did
            not change lanes.
        resumed: by stage and layout what calls show that went on with items begun elsewhere.
        finishes: (replicas, seconds) by stage and layout.
        publishes: seconds by (source, target, place, lanes of a source replica, of a target one).
        transfers: (bytes, seconds) between lanes of one machine.
        moves: seconds by worker and layout, and "onload" or "offload".
        states: bytes on a lane by worker and layout.
        output_bytes: (items, bytes) by stage.
        mixed_bytes: the same where some of the bytes may be of items that were not finished yet.
        lengths: of output items by stage.
        turns: of items in a loop, by its first stage.
        working: (items of the replica, bytes on a lane beside the state) by stage and layout.
        finishing: the same of its `finish`, the most that was seen.
        gaps: seconds from a lane's end to its next call, where nothing else could have caused it.
    """

    calls: dict[LayoutKey, list[Call]] = field(default_factory=_lists)
    resumed: dict[LayoutKey, list[Resumed]] = field(default_factory=_lists)
    finishes: dict[LayoutKey, Sizes] = field(default_factory=_lists)
    publishes: dict[tuple[str, str, str, int, int], list[float]] = field(default_factory=_lists)
    transfers: Sizes = field(default_factory=list)
    moves: dict[tuple[str, int, str, str], list[float]] = field(default_factory=_lists)
    states: dict[LayoutKey, int] = field(default_factory=dict)
    output_bytes: dict[str, Sizes] = field(default_factory=_lists)
    mixed_bytes: dict[str, Sizes] = field(default_factory=_lists)
    lengths: dict[str, list[float]] = field(default_factory=_lists)
    turns: dict[str, list[float]] = field(default_factory=_lists)
    working: dict[LayoutKey, Sizes] = field(default_factory=_lists)
    finishing: dict[LayoutKey, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def add(self, graph: FlowGraph, one: Observed) -> None:
        """Take the measurements of one run in."""
        nodes = {node.name: node for node in graph.nodes}
        counted = list(one.spans if one.warm else _without_first(one.spans))
        known = {(span.name, span.kind) for span in counted}
        counted += [span for span in one.spans if (span.name, span.kind) not in known]
        layouts, busy = (
            _Layouts(one.plan),
            BusyLanes(one.spans, [lane.id for lane in one.plan.lanes]),
        )
        calls = [span for span in counted if span.kind == "call" and span.name in nodes]
        for spans in _by_call(calls):
            self._add_call(nodes[spans[0].name], spans, layouts, busy)
        self._add_resumed(one.spans, calls, nodes, layouts, busy)
        self._add_finishes([span for span in counted if span.kind == "finish"], nodes, layouts)
        self._add_publishes([span for span in counted if span.kind == "publish"], graph, layouts)
        self._add_working([span for span in one.gauged if span.name in nodes], nodes, layouts)
        self._add_sizes(one.spans, nodes)
        self._add_turns(one.spans, graph)
        for span in counted:
            if "bytes" in span.args and span.kind == "transfer" and layouts.one_machine:
                self.transfers.append((_number(span, "bytes"), span.seconds))
            elif span.kind == "switch" and "what" in span.args:
                worker = str(span.args.get("worker", span.name))
                self._add_move(worker, str(span.args["what"]), span.seconds, layouts)
        for worker, what, seconds in one.moves:
            self._add_move(worker, what, seconds, layouts)
        for worker, spot in one.plan.placements.items():
            key = (worker, *layouts.of(worker))
            if spot.state_bytes:
                self.states[key] = max(self.states.get(key, 0), spot.state_bytes)
        self.gaps += gaps(one.spans, one.steps)

    def _add_call(
        self, node: StageNode, spans: Sequence[Span], layouts: _Layouts, busy: BusyLanes
    ) -> None:
        key = (node.name, *layouts.of(node.worker, spans[0].lane))
        items = sum(_number(span, "items") for span in spans)
        longest = max(spans, key=lambda span: ("taken" in span.args, span.seconds))
        on_cpu = key[2] == "cpu" and longest.seconds > 0
        effort = _number(longest, "cpu_seconds") / longest.seconds if on_cpu else 0.0
        beside = busy.beside(longest, [span.lane for span in spans])
        call = Call(items, longest.seconds, beside, effort)
        if node.streaming:
            streamed = _streamed(call, longest, node.expands)
            self.calls[key] += [streamed] if streamed else []
        elif items:
            self.calls[key].append(call)

    def _add_resumed(
        self,
        spans: Iterable[Span],
        counted: Iterable[Span],
        nodes: Mapping[str, StageNode],
        layouts: _Layouts,
        busy: BusyLanes,
    ) -> None:
        """Find out how far items were that calls gave back, and what going on with them took."""
        known: dict[tuple[str, object], dict[int, float]] = defaultdict(dict)
        for span in spans:
            known[span.name, span.args.get("step")] |= grown_of(span)
        for span in counted:
            if changed_lanes(span):
                node = nodes[span.name]
                gang = layouts.gang(node.worker, span.lane)
                self.resumed[node.name, *layouts.of(node.worker, span.lane)] += resumed(
                    span,
                    int(_number(span, "items")),
                    node.expands,
                    busy.beside(span, gang),
                    known[span.name, span.args.get("step")],
                )

    def _add_finishes(
        self, spans: Sequence[Span], nodes: Mapping[str, StageNode], layouts: _Layouts
    ) -> None:
        together: dict[tuple[object, ...], list[Span]] = defaultdict(list)
        for number, span in enumerate(spans):
            at = (span.args.get("step", number), span.args.get("minibatch", 0))
            together[(span.name, *at)].append(span)
        for (name, *_), some in together.items():
            worker = nodes[str(name)].worker
            seconds = max(span.seconds for span in some)
            key = (str(name), *layouts.of(worker, some[0].lane))
            self.finishes[key].append((layouts.replicas(worker), seconds))

    def _add_publishes(self, spans: Sequence[Span], graph: FlowGraph, layouts: _Layouts) -> None:
        exports: dict[tuple[object, object], float] = {}
        installs: dict[tuple[str, str, object, str], float] = {}
        targets = {edge.target for edge in graph.weight_edges}
        for span in spans:
            source, version = str(span.args.get("source", span.name)), span.args.get("version")
            if span.args.get("what") == "export":
                exports[source, version] = max(exports.get((source, version), 0.0), span.seconds)
            elif span.name in targets:
                place = "same" if span.args.get("local") else layouts.place(source, span.lane)
                key = (source, span.name, version, place)
                installs[key] = max(installs.get(key, 0.0), span.seconds)
        for (source, target, version, place), seconds in installs.items():
            if place != "same":
                seconds += exports.get((source, version), 0.0)
            lanes = (layouts.of(source)[0], layouts.of(target)[0])
            self.publishes[(source, target, place, *lanes)].append(seconds)

    def _add_working(
        self, spans: Sequence[Span], nodes: Mapping[str, StageNode], layouts: _Layouts
    ) -> None:
        for some in _by_call(span for span in spans if "working_bytes" in span.args):
            first = some[0]
            key = (first.name, *layouts.of(nodes[first.name].worker, first.lane))
            most = max(_number(span, "working_bytes") for span in some)
            items = sum(_number(span, "items") for span in some)
            if first.kind == "finish":
                self.finishing[key] = max(most, self.finishing.get(key, 0.0))
            elif first.kind == "call" and items and not any(map(came_apart, some)):
                self.working[key].append((items, most))

    def _add_sizes(self, spans: Sequence[Span], nodes: Mapping[str, StageNode]) -> None:
        moved = {span.name for span in spans if changed_lanes(span)}
        for span in spans:
            if span.kind == "call" and "bytes" in span.args and span.name in nodes:
                items = _number(span, "items") * nodes[span.name].expands
                known = self.mixed_bytes if changed_lanes(span) else self.output_bytes
                known[span.name].append((items, _number(span, "bytes")))
            made_by = span.args.get("made_by")
            if span.kind == "transfer" and isinstance(made_by, list) and len(made_by) == 1:
                sizes = (_number(span, "items"), _number(span, "bytes"))
                known = self.mixed_bytes if made_by[0] in moved else self.output_bytes
                known[made_by[0]].append(sizes)
            pieces = span.args.get("pieces")
            if isinstance(pieces, list):
                self.lengths[span.name] += [x for _, _, lengths in pieces for x in lengths]

    def _add_turns(self, spans: Iterable[Span], graph: FlowGraph) -> None:
        firsts = {graph.nodes[loop.members[0]].name for loop in graph.loops}
        seen: dict[tuple[str, object], dict[int, int]] = defaultdict(dict)
        for span in spans:
            if span.kind == "call" and span.name in firsts:
                counts = seen[span.name, span.args.get("step")]
                for item in ids_of(str(span.args.get("ids", ""))):
                    counts[item] = counts.get(item, 0) + 1
        for (name, _), counts in seen.items():
            self.turns[name] += [float(turns) for turns in counts.values()]

    def _add_move(self, worker: str, what: str, seconds: float, layouts: _Layouts) -> None:
        self.moves[(worker, *layouts.of(worker), what)].append(seconds)


class _Layouts:
    """How a plan lays workers out."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._lanes = plan, {lane.id: lane for lane in plan.lanes}
        self.one_machine = len({lane.node for lane in plan.lanes}) == 1

    def of(self, worker: str, lane: int | None = None) -> tuple[int, str]:
        """Lanes of a replica, and their kind: that of a lane of it, or of the first replica's."""
        gang = self._plan.placements[worker].replicas[0]
        return len(gang), self._lanes[gang[0] if lane is None else lane].kind

    def gang(self, worker: str, lane: int) -> tuple[int, ...]:
        """The lanes of the replica that one of them belongs to."""
        replicas = self._plan.placements[worker].replicas
        return next((gang for gang in replicas if lane in gang), (lane,))

    def replicas(self, worker: str) -> int:
        return len(self._plan.placements[worker].replicas)

    def place(self, source: str, lane: int) -> str:
        """How far a lane is from the first replica of a worker on another one."""
        nodes = {self._lanes[x].node for x in self._plan.placements[source].replicas[0]}
        return "node" if nodes == {self._lanes[lane].node} else "cluster"


def _number(span: Span, name: str) -> float:
    value = span.args.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _without_first(spans: Iterable[Span]) -> Iterator[Span]:
    """All but the first of each sort on each lane."""
    seen = set()
    for span in sorted(spans, key=lambda one: one.start):
        what = (span.lane, span.name, span.kind)
        if what in seen:
            yield span
        seen.add(what)


def _by_call(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """The spans of each call: one for each lane of a gang."""
    calls: dict[tuple[object, ...], list[Span]] = {}
    for number, span in enumerate(spans):
        call = span.args.get("call")
        key = (span.name, "alone", number) if call is None else (span.name, "call", call)
        calls.setdefault(key, []).append(span)
    yield from calls.values()


def _streamed(call: Call, span: Span, expands: int) -> Call | None:
    """A streaming call with its pieces; None if it was fed, or items changed lanes."""
    pieces = pieces_of(span)
    if came_apart(span) or not call.items:
        return None
    counts = tuple(len(ids_of(ids)) for _, ids, _ in pieces)
    if pieces and sum(counts) != call.items * expands:
        return None
    times = tuple((when, tuple(map(float, lengths))) for when, _, lengths in pieces)
    return replace(call, pieces=times, counts=counts)
