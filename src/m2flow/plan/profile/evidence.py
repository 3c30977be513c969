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
from m2flow.engine.spans import Span, ids_of
from m2flow.flow.graph import FlowGraph
from m2flow.plan.profile.data import NO_TIME, PublishCost

NEWEST, OF_ONE_SIZE = 256, 48
"""So many measurements of each sort are kept, and of calls so many of each size."""

SAME_MOMENT = 2e-3
"""Seconds between the end of a transfer and the start of the call that it was for, at most."""

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


class NewestOfEachSize:
    """Samples of which the newest of each size are kept.

    Calls of one size come in their thousands, and must not push out the few of another size.
    """

    def __init__(self) -> None:
        self._kept: dict[float, deque[Sample]] = defaultdict(lambda: deque(maxlen=OF_ONE_SIZE))

    def append(self, sample: Sample) -> None:
        """Keep a sample."""
        self._kept[sample.size].append(sample)

    def __iter__(self) -> Iterator[Sample]:
        return (sample for size in sorted(self._kept) for sample in self._kept[size])

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))


class Evidence:
    """Measurements of a flow as they come in, step by step.

    Args:
        graph: of the steps.

    Attributes:
        calls, finishes, working: by stage and layout. `finishes` are by number of replicas;
            `working` are bytes on a lane beside the state, of a `finish` as of a call of 0 items.
        fed: streaming calls that were given items while they ran, by stage and layout.
        moves: seconds by worker and layout, and "onload" or "offload".
        states: bytes on a lane by worker and layout.
        publishes: seconds by what is priced, as a `PublishCost` without a price.
        transfers: between lanes of one machine, by bytes.
        gaps: (events of other lanes shortly before, items, seconds) from a lane's end to its next
            call, where nothing else can have caused that call.
        output_bytes: (items, bytes) by stage.
        lengths: of output items, by stage.
        turns: of items in a loop, by its first stage.
    """

    def __init__(self, graph: FlowGraph) -> None:
        self.graph = graph
        self._nodes = {node.name: node for node in graph.nodes}
        self.calls: dict[Where, NewestOfEachSize] = defaultdict(NewestOfEachSize)
        self.fed: dict[Where, NewestOfEachSize] = defaultdict(NewestOfEachSize)
        self.finishes: dict[Where, NewestOfEachSize] = defaultdict(NewestOfEachSize)
        self.working: dict[Where, NewestOfEachSize] = defaultdict(NewestOfEachSize)
        self.moves: dict[tuple[Where, str], deque[float]] = _newest()
        self.states: dict[Where, int] = {}
        self.publishes: dict[PublishCost, deque[float]] = _newest()
        self.transfers: deque[Sample] = deque(maxlen=NEWEST)
        self.gaps: deque[tuple[int, float, float]] = deque(maxlen=NEWEST)
        self.output_bytes: dict[str, deque[tuple[float, float]]] = _newest()
        self.lengths: dict[str, deque[float]] = _newest(16)
        self.turns: dict[str, deque[float]] = _newest(16)

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
                each stage on each lane does not count.
            moves: (worker, "onload" or "offload", seconds) of moves that were made beside them.
            gauged: spans of a step that say what calls took of memory; their seconds do not count.
        """
        steps, placed = list(steps), _Placed(plan)
        spans = [span for step in steps for span in step.spans]
        counted = spans if warm else list(_without_first(spans))
        known = {(span.name, span.kind) for span in counted}
        counted = [*counted, *(one for one in spans if (one.name, one.kind) not in known)]
        for call in _by_call(span for span in counted if span.kind == "call"):
            self._add_call(call, placed)
        self._add_finishes([span for span in counted if span.kind == "finish"], placed)
        self._add_publishes([span for span in counted if span.kind == "publish"], placed)
        self._add_memory(gauged, placed)
        self._add_items(spans)
        for span in counted:
            if "bytes" in span.args and span.kind == "transfer" and placed.on_one_machine:
                self.transfers.append(Sample(_number(span, "bytes"), span.seconds))
            elif span.kind == "switch" and "what" in span.args:
                worker = str(span.args.get("worker", span.name))
                self.moves[placed.of(worker), str(span.args["what"])].append(span.seconds)
        for worker, what, seconds in moves:
            self.moves[placed.of(worker), what].append(seconds)
        for worker, spot in plan.placements.items():
            if spot.state_bytes:
                where = placed.of(worker)
                self.states[where] = max(self.states.get(where, 0), spot.state_bytes)
        self.gaps.extend(_gaps(spans, [step.started for step in steps]))

    def timed(self) -> dict[Where, NewestOfEachSize]:
        """Return calls by stage and layout: fed ones only where there are no others.

        A fed call took at least as long as one that is given all its items at once.
        """
        return {where: some for where, some in {**self.fed, **self.calls}.items() if some}

    def _add_call(self, spans: Sequence[Span], placed: _Placed) -> None:
        node = self._nodes.get(spans[0].name)
        if node is None:
            return
        where = placed.of(node.worker, spans[0].lane, node.name)
        items = sum(_number(span, "items") for span in spans)
        longest = max(spans, key=lambda span: ("taken" in span.args, span.seconds))
        call = Sample(items, longest.seconds)
        if not items:
            return
        if not node.streaming:
            self.calls[where].append(call)
        elif len(_listed(longest, "taken")) > 1:
            self.fed[where].append(call)
        else:
            pieces = tuple(
                (float(when), ids_of(str(ids)), tuple(map(float, lengths)))
                for when, ids, lengths in _listed(longest, "pieces")
            )
            if not pieces or sum(len(ids) for _, ids, _ in pieces) == items * node.expands:
                self.calls[where].append(replace(call, pieces=pieces))

    def _add_finishes(self, spans: Sequence[Span], placed: _Placed) -> None:
        together: dict[tuple[object, ...], list[Span]] = defaultdict(list)
        for number, span in enumerate(spans):
            at = (span.args.get("step", number), span.args.get("minibatch", 0))
            together[(span.name, *at)].append(span)
        for some in together.values():
            worker = self._nodes[some[0].name].worker
            where = placed.of(worker, some[0].lane, some[0].name)
            seconds = max(span.seconds for span in some)
            self.finishes[where].append(Sample(placed.replicas(worker), seconds))

    def _add_publishes(self, spans: Sequence[Span], placed: _Placed) -> None:
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

    def _add_memory(self, spans: Sequence[Span], placed: _Placed) -> None:
        gauged = (span for span in spans if "working_bytes" in span.args)
        for some in _by_call(span for span in gauged if span.name in self._nodes):
            first, most = some[0], max(_number(span, "working_bytes") for span in some)
            where = placed.of(self._nodes[first.name].worker, first.lane, first.name)
            items = sum(_number(span, "items") for span in some)
            at_once = items and all(len(_listed(span, "taken")) <= 1 for span in some)
            if first.kind == "finish" or at_once:
                self.working[where].append(Sample(items * (first.kind == "call"), most))

    def _add_items(self, spans: Sequence[Span]) -> None:
        """Add what items weigh, how long they are, and how often they go around their loop."""
        firsts = {self.graph.nodes[loop.members[0]].name for loop in self.graph.loops}
        visits: dict[tuple[str, object], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for span in spans:
            made_by, node = _listed(span, "made_by"), self._nodes.get(span.name)
            if span.kind == "call" and node is not None and "bytes" in span.args:
                items = _number(span, "items") * node.expands
                self.output_bytes[span.name].append((items, _number(span, "bytes")))
            elif span.kind == "transfer" and len(made_by) == 1:
                sizes = (_number(span, "items"), _number(span, "bytes"))
                self.output_bytes[str(made_by[0])].append(sizes)
            if span.kind == "call" and span.name in firsts:
                for item in ids_of(str(span.args.get("ids", ""))):
                    visits[span.name, span.args.get("step")][item] += 1
            for _, _, lengths in _listed(span, "pieces"):
                self.lengths[span.name].extend(map(float, lengths))
        for (name, _), counts in visits.items():
            self.turns[name].extend(map(float, counts.values()))


class _Placed:
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

    def replicas(self, worker: str) -> int:
        return len(self._plan.placements[worker].replicas)

    def place(self, source: str, lane: int) -> str:
        """Say how far a lane is from the first replica of a worker on another one."""
        nodes = {self._lanes[x].node for x in self._plan.placements[source].replicas[0]}
        return "node" if nodes == {self._lanes[lane].node} else "cluster"


def _gaps(spans: Sequence[Span], started: Sequence[float]) -> Iterator[tuple[int, float, float]]:
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
                yield earlier, _number(before, "items"), start - last
            before, brought = span, None


def _newest(times: int = 1) -> Any:
    """Return a mapping to lists that keep their newest entries."""
    return defaultdict(lambda: deque(maxlen=times * NEWEST))


def _number(span: Span, name: str) -> float:
    value = span.args.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _listed(span: Span, name: str) -> list[Any]:
    value = span.args.get(name, [])
    return value if isinstance(value, list) else []


def _without_first(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield all spans but the first of each sort on each lane."""
    seen = set()
    for span in sorted(spans, key=lambda one: one.start):
        what = (span.lane, span.name, span.kind)
        if what in seen:
            yield span
        seen.add(what)


def _by_call(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield the spans of each call: one for each lane of a gang."""
    calls: dict[tuple[object, ...], list[Span]] = {}
    for number, span in enumerate(spans):
        call = span.args.get("call")
        key = (span.name, "alone", number) if call is None else (span.name, "call", call)
        calls.setdefault(key, []).append(span)
    yield from calls.values()
