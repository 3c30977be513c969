"""What was seen of real steps, and the single measurements in it.

`Observed` is a run of some steps under one plan; `read` takes its spans apart: calls by replica,
streaming calls piece by piece, `finish`, publishing, transfers, moves of state, and the time from
a lane's end to its next call. It judges nothing: fitting is done elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from m2flow.engine.facts import ids_of
from m2flow.engine.plan import Plan
from m2flow.engine.runner import StepResult
from m2flow.engine.spans import Span
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.busy import BusyLanes
from m2flow.plan.measured.gaps import gaps, pieces_of

Sizes: TypeAlias = list[tuple[float, float]]
"""Measurements: (size, seconds)."""


@dataclass(frozen=True)
class Observed:
    """Steps of a flow under one plan.

    Attributes:
        plan: with the sizes of the workers' states, where they are known.
        num_items: source items of each step.
        spans: everything that the lanes did, of all steps.
        steps: of each step when it was submitted, and how long it took.
        warm: whether steps before these have warmed the lanes up. If not, the first call of each
            stage on each lane does not count.
        moves: (worker, "onload" or "offload", seconds) of moves that were made beside the steps.
    """

    plan: Plan
    num_items: int
    spans: tuple[Span, ...]
    steps: tuple[tuple[float, float], ...] = ()
    warm: bool = False
    moves: tuple[tuple[str, str, float], ...] = ()

    @classmethod
    def of(
        cls,
        plan: Plan,
        num_items: int,
        results: Iterable[StepResult],
        *,
        warm: bool = False,
        moves: Iterable[tuple[str, str, float]] = (),
    ) -> Self:
        """The steps with these results."""
        results = list(results)
        spans = tuple(span for result in results for span in result.spans)
        steps = tuple((result.started, result.seconds) for result in results)
        return cls(plan, num_items, spans, steps, warm, tuple(moves))


@dataclass(frozen=True)
class Call:
    """A call of one replica.

    Attributes:
        items: that it took.
        seconds: until its end.
        beside: how busy the other lanes were meanwhile, from 0 (all idle) to 1.
        effort: seconds of processors that the lane's process had in each second of it; 0 if that is
            not known.
        pieces: of a streaming call, when items were handed on, and the length of each (empty where
            there are none).
        counts: how many items each piece had.
    """

    items: float
    seconds: float
    beside: float = 1.0
    effort: float = 0.0
    pieces: tuple[tuple[float, tuple[float, ...]], ...] = ()
    counts: tuple[int, ...] = ()

    def slowed(self, factor: float) -> Call:
        """The same call, had everything in it taken so many times as long."""
        pieces = tuple((when * factor, lengths) for when, lengths in self.pieces)
        return replace(self, seconds=self.seconds * factor, pieces=pieces)

    @property
    def outputs(self) -> int:
        """Items handed on."""
        return sum(self.counts)

    @property
    def has_lengths(self) -> bool:
        """Whether the length of every item is known."""
        return all(
            len(lengths) == n for (_, lengths), n in zip(self.pieces, self.counts, strict=True)
        )


LayoutKey: TypeAlias = tuple[str, int, str]
"""A stage or worker, lanes of a replica, kind of lane."""


def _lists() -> Any:
    return defaultdict(list)


@dataclass
class Samples:
    """Single measurements.

    Attributes:
        calls: by stage and layout; of streaming ones those whose items all came together.
        finishes: (replicas, seconds) by stage and layout.
        publishes: seconds by (source, target, place, lanes of a source replica, of a target one).
        transfers: (bytes, seconds) between lanes of one machine.
        moves: seconds by worker and layout, and "onload" or "offload".
        states: bytes on a lane by worker and layout.
        output_bytes: (items, bytes) by stage.
        lengths: of output items by stage.
        turns: of items in a loop, by its first stage.
        working: (items of the replica, bytes on a lane beside the state) by stage and layout.
        gaps: seconds from a lane's end to its next call, where nothing else could have caused it.
    """

    calls: dict[LayoutKey, list[Call]] = field(default_factory=_lists)
    finishes: dict[LayoutKey, Sizes] = field(default_factory=_lists)
    publishes: dict[tuple[str, str, str, int, int], list[float]] = field(default_factory=_lists)
    transfers: Sizes = field(default_factory=list)
    moves: dict[tuple[str, int, str, str], list[float]] = field(default_factory=_lists)
    states: dict[LayoutKey, int] = field(default_factory=dict)
    output_bytes: dict[str, Sizes] = field(default_factory=_lists)
    lengths: dict[str, list[float]] = field(default_factory=_lists)
    turns: dict[str, list[float]] = field(default_factory=_lists)
    working: dict[LayoutKey, Sizes] = field(default_factory=_lists)
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
        self._add_finishes([span for span in counted if span.kind == "finish"], nodes, layouts)
        self._add_publishes([span for span in counted if span.kind == "publish"], graph, layouts)
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
        room = max((_number(span, "working_bytes") for span in spans), default=0.0)
        if room:
            self.working[key].append((items, room))
        longest = max(spans, key=lambda span: span.seconds)
        on_cpu = key[2] == "cpu" and longest.seconds > 0
        effort = _number(longest, "cpu_seconds") / longest.seconds if on_cpu else 0.0
        beside = busy.beside(longest, [span.lane for span in spans])
        call = Call(items, longest.seconds, beside, effort)
        if node.streaming:
            streamed = _streamed(call, longest, node.expands)
            self.calls[key] += [streamed] if streamed else []
        elif items:
            self.calls[key].append(call)

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

    def _add_sizes(self, spans: Iterable[Span], nodes: Mapping[str, StageNode]) -> None:
        for span in spans:
            if span.kind == "call" and "bytes" in span.args and span.name in nodes:
                items = _number(span, "items") * nodes[span.name].expands
                self.output_bytes[span.name].append((items, _number(span, "bytes")))
            made_by = span.args.get("made_by")
            if span.kind == "transfer" and isinstance(made_by, list) and len(made_by) == 1:
                sizes = (_number(span, "items"), _number(span, "bytes"))
                self.output_bytes[made_by[0]].append(sizes)
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
    """A streaming call with its pieces; None if it was fed, or gave items back."""
    taken, pieces = span.args.get("taken", []), pieces_of(span)
    if not isinstance(taken, list) or len(taken) > 1 or not call.items:
        return None
    counts = tuple(len(ids_of(ids)) for _, ids, _ in pieces)
    if pieces and sum(counts) != call.items * expands:
        return None
    times = tuple((when, tuple(map(float, lengths))) for when, _, lengths in pieces)
    return replace(call, pieces=times, counts=counts)
