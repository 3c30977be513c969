"""`Publisher`: decides on the launcher's side which way each worker's weights travel, and says why.

Lanes near the source (of its node) and lanes of other nodes are decided on apart, each by predicted
cost. Before the first export nothing is known of the weights, so the first version goes by shared
memory and by copies; then the sizes are known, and what goes to other nodes is decided again
whenever the measured share of changed elements says so. It also keeps who still needs a version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args

from m2flow.engine.messages import InstallWeights
from m2flow.engine.plan import Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.runtime.lane.orders import Export, Sends
from m2flow.runtime.transport.blocks import MAX_READERS
from m2flow.runtime.transport.table import LinkTable
from m2flow.runtime.weights.choose import Choice, Method, Publish, Scope, choose
from m2flow.runtime.weights.rates import Rates

METHODS: tuple[Method, ...] = get_args(Method)

MEASURED_SECOND = 2
"""The version, counted from the first that is published, whose change is measured first. Only what
goes to other nodes is measured, by a sample of the snapshots that are there anyway."""

MEASURED_EVERY = 16
"""And every so many after it, until deltas are sent: an encoder knows the share by itself."""

WORTH_CHANGING = 0.8
"""Another way is taken if it is predicted to take less than this share of the present way's."""

Reader = tuple[str, int]
"""A worker that takes weights over, and the lane where it does."""


class Lanes(Protocol):
    """What is to be known of a pool of lanes."""

    links: LinkTable

    def same_node(self, first: int, second: int) -> bool: ...


@dataclass(slots=True)
class _Version:
    """Where one version lies, and how many installs of it are still to come."""

    readers: dict[int, dict[Reader, tuple[Method, int]]]  # by exporting lane: way, number in it
    exports: dict[int, dict[Method, Export]] = field(default_factory=dict)
    left: int = 0


@dataclass(slots=True)
class _Edge:
    """A worker that publishes, and everybody who takes its weights over from other lanes."""

    source: str
    lanes: tuple[int, ...]  # which export
    readers: tuple[Reader, ...]
    near: Method = "shared"
    far: Method = "copy"
    choices: dict[str, Choice] = field(default_factory=dict)
    num_bytes: int = 0
    changed: float | None = None
    published: int = 0
    versions: dict[int, _Version] = field(default_factory=dict)


class Publisher:
    """Plans the exports and installs of a run.

    Args:
        pool: the lanes.
        plan: where workers stand.
        graphs: the flow's traced methods, of which the weight edges count.
        order: the lanes of the pool, in order of position.
        method: the one way to send; None for the fastest. Those who stand where the source stands
            whole take its own tensors in any case.
        link: the one way that payloads take, or None.
        rates: of this machine's memory; measured when they are needed first, unless given.

    Raises:
        UserError: the method cannot be had.
    """

    def __init__(
        self,
        pool: Lanes,
        plan: Plan,
        graphs: Mapping[str, FlowGraph],
        order: Sequence[int],
        method: str | None = None,
        link: str | None = None,
        rates: Rates | None = None,
    ) -> None:
        if method is not None and method not in METHODS:
            raise UserError(
                "unknown way to publish", key="publish", value=method, expected=", ".join(METHODS)
            )
        self._pool, self._order, self._link = pool, list(order), link
        self._forced: Method | None = method
        self._rates = rates
        self._edges: dict[str, _Edge] = {}
        self._installs: dict[int, tuple[str, int]] = {}
        edges = {edge for graph in graphs.values() for edge in graph.weight_edges}
        for source in dict.fromkeys(edge.source for edge in sorted(edges, key=str)):
            gangs = plan.placements[source].replicas
            home = set(plan.placements[source].lanes) if len(gangs[0]) == 1 else set()
            targets = sorted({edge.target for edge in edges if edge.source == source})
            readers = tuple(
                (target, lane)
                for target in targets
                for lane in sorted(plan.placements[target].lanes)
                if lane not in home
            )
            if readers:
                self._edges[source] = edge = _Edge(source, tuple(gangs[0]), readers)
                self._begin(edge)

    def _begin(self, edge: _Edge) -> None:
        """What the first version goes by."""
        if self._link is not None or len(edge.readers) > MAX_READERS:
            edge.near = "copy"
        if self._forced == "broadcast" and self._why_no_broadcast(edge):
            raise UserError(
                f"{edge.source}'s weights cannot be broadcast: {self._why_no_broadcast(edge)}",
                key="publish",
                value="broadcast",
                hint="leave the way to the predicted cost, or take copy or delta",
            )
        if self._forced == "shared" and self._far(edge):
            raise UserError(
                f"{edge.source}'s weights go to other nodes, which share no memory with it",
                key="publish",
                value="shared",
                hint="leave the way to the predicted cost, or take copy, broadcast or delta",
            )
        if self._forced is not None:
            edge.near = edge.far = self._forced

    def _far(self, edge: _Edge, lane: int | None = None) -> list[Reader]:
        """Who reads from another node than the exporting lane's; by default than the first's."""
        there = edge.lanes[0] if lane is None else lane
        return [reader for reader in edge.readers if not self._pool.same_node(there, reader[1])]

    def _nodes(self, edge: _Edge, lane: int | None = None) -> list[list[Reader]]:
        """The same, those of each node together."""
        nodes: list[list[Reader]] = []
        for reader in self._far(edge, lane):
            for others in nodes:
                if self._pool.same_node(others[0][1], reader[1]):
                    others.append(reader)
                    break
            else:
                nodes.append([reader])
        return nodes

    def _relay(self, edge: _Edge, lane: int, reader: Reader) -> int | None:
        """The lane that brings weights to a reader's node; None where there is but this reader."""
        for others in self._nodes(edge, lane):
            if reader in others and len(others) > 1:
                return others[0][1]
        return None

    def _broadcast_to(self, edge: _Edge) -> list[Reader]:
        return list(edge.readers) if self._forced == "broadcast" else self._far(edge)

    def _why_no_broadcast(self, edge: _Edge) -> str:
        """What is in the way of a broadcast; nothing if it can be had."""
        if len(edge.lanes) > 1:
            return "it stands on a gang, in shards"
        lanes = [lane for _, lane in self._broadcast_to(edge)]
        if len(set(lanes)) < len(lanes):
            return "two workers on one lane take them over"
        return ""

    def _group(self, edge: _Edge) -> tuple[int, ...]:
        """Positions of the lanes that a broadcast needs together; empty where there is none."""
        readers = self._broadcast_to(edge)
        if self._forced not in (None, "broadcast") or self._why_no_broadcast(edge):
            return ()
        if self._forced is None and len(readers) < 2:
            return ()
        lanes = {edge.lanes[0], *(lane for _, lane in readers)}
        return tuple(sorted(self._order.index(lane) for lane in lanes))

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Source -> positions of the lanes that have to make a process group to broadcast it."""
        groups = {source: self._group(edge) for source, edge in self._edges.items()}
        return {source: lanes for source, lanes in groups.items() if lanes}

    # --- a version on its way ---------------------------------------------------------------------

    def export(self, source: str, version: int, lanes: Sequence[int]) -> dict[int, Sends]:
        """How each of the lanes is to lay a version out."""
        edge = self._edges[source]
        edge.published += 1
        found: dict[int, Sends] = {}
        state = edge.versions[version] = _Version({}, left=len(edge.readers))
        needed = [number for number, other in edge.versions.items() if other.left > 0]
        edge.versions = {number: edge.versions[number] for number in needed}
        probing = self._forced is None and edge.far != "delta" and bool(self._far(edge))
        since = edge.published - MEASURED_SECOND
        for lane in lanes:
            far = set(self._far(edge, lane))
            ways: dict[Reader, tuple[Method, int]] = {}
            counts: dict[Method, int] = {}
            for reader in edge.readers:
                method = edge.far if reader in far else edge.near
                ways[reader] = method, counts.get(method, 0)
                counts[method] = counts.get(method, 0) + 1
            state.readers[lane] = ways
            found[lane] = Sends(
                counts,
                min(edge.versions),
                self._group(edge) if "broadcast" in counts else (),
                keep=probing and (since + 1) % MEASURED_EVERY == 0,
                measure=probing and since % MEASURED_EVERY == 0,
            )
        return found

    def laid_out(self, exports: Sequence[Export]) -> None:
        """What a lane says of its export; after the last of them the ways are looked at again."""
        edge = self._edges[exports[0].source]
        state = edge.versions[exports[0].version]
        for export in exports:
            state.exports.setdefault(export.lane, {})[export.method] = export
        if len(state.exports) < len(state.readers):
            return
        ends = [next(iter(by_method.values())) for by_method in state.exports.values()]
        everything = [x for by_method in state.exports.values() for x in by_method.values()]
        changed = [export.changed for export in everything if export.changed is not None]
        if changed:
            edge.changed = sum(changed) / len(changed)
        if changed or not edge.num_bytes:
            edge.num_bytes = sum(export.full_bytes for export in ends)
            self._decide(edge)

    def install(self, command: InstallWeights) -> list[Export]:
        """Where a lane finds the version that it is to install."""
        edge, reader = self._edges[command.source], (command.target, command.lanes[0])
        state = edge.versions[command.version]
        self._installs[command.call] = (command.source, command.version)
        found = []
        for lane, ways in state.readers.items():
            method, number = ways[reader]
            via = self._relay(edge, lane, reader) if method in ("copy", "delta") else None
            found.append(replace(state.exports[lane][method], reader=number, via=via))
        return found

    def finished(self, call: int) -> None:
        """A call has ended; if it was an install, its version has one reader less."""
        if call in self._installs:
            source, version = self._installs.pop(call)
            self._edges[source].versions[version].left -= 1

    # --- which way --------------------------------------------------------------------------------

    def _decide(self, edge: _Edge) -> None:
        """Take the fastest way to the lanes near the source, and to those of other nodes."""
        far = self._far(edge)
        near = [reader for reader in edge.readers if reader not in far]
        own = sum(lane in edge.lanes for _, lane in near)
        whole = len(edge.lanes) == 1
        if near:
            targets: dict[Scope, int] = {"lane": own, "node": len(near) - own}
            publish = Publish(edge.num_bytes, targets, whole=whole, fraction_changed=edge.changed)
            edge.choices["near"] = found = choose(publish, self._pool.links)
            if self._forced is None and edge.near == "shared":
                edge.near = found.method
        if far:
            edge.choices["far"] = found = self._far_choice(edge, len(far), whole=whole)
            now = _seconds(found, edge.far)
            if self._forced is None and (
                now is None or found.predicted_seconds < WORTH_CHANGING * now
            ):
                edge.far = found.method

    def _far_choice(self, edge: _Edge, count: int, *, whole: bool) -> Choice:
        """Copies and deltas cross the network once for each node; a broadcast goes to each lane."""
        self._rates = self._rates or Rates.measure()
        publish = Publish(
            edge.num_bytes,
            {"cluster": len(self._nodes(edge))},
            fraction_changed=edge.changed,
            whole=whole,
        )
        found = choose(publish, self._pool.links, self._rates)
        if not self._group(edge):
            return found
        to_each = replace(publish, targets={"cluster": count}, group=True)
        others = choose(to_each, self._pool.links, self._rates).reasons
        ways = [way for way in found.reasons if way.method != "broadcast"]
        ways += [way for way in others if way.method == "broadcast"]
        ways.sort(key=lambda way: math.inf if way.seconds is None else way.seconds)
        assert ways[0].seconds is not None, "a copy needs no more than a link"
        return Choice(ways[0].method, ways[0].seconds, tuple(ways))

    def explain(self) -> dict[str, str]:
        """Each way that is taken, once something has been published -> what it is predicted to
        take, and what the others would."""
        found = {}
        for edge in self._edges.values():
            for where in edge.choices:
                far = self._far(edge)
                readers = [one for one in edge.readers if (one in far) == (where == "far")]
                names = ", ".join(dict.fromkeys(target for target, _ in readers))
                lanes = "a lane" if len(readers) == 1 else f"{len(readers)} lanes"
                nodes = "other nodes" if where == "far" else "its node"
                method = edge.far if where == "far" else edge.near
                way = f"{edge.source} publishes to {names} on {lanes} of {nodes} by {method}"
                found[way] = self._reckoning(edge, where, method)
        return found

    def _reckoning(self, edge: _Edge, where: str, method: Method) -> str:
        """Size, predicted time and reason, for people."""
        choice = edge.choices[where]
        others = [
            f"{way.method} {1e3 * way.seconds:.3g} ms"
            for way in choice.reasons
            if way.seconds is not None and way.method != method
        ]
        reasons = [f"instead of {', '.join(others)}"] if others else []
        if self._forced is not None:
            reasons = ["as asked for"]
        elif self._link is not None and where == "near":
            reasons = [f"as all payloads go by {self._link}"]
        if where == "far" and edge.changed is not None:
            reasons.append(f"{edge.changed:.2%} of the elements changed")
        seconds = _seconds(choice, method)
        predicted = "" if seconds is None else f" in about {1e3 * seconds:.3g} ms"
        why = f" ({'; '.join(reasons)})" if reasons else ""
        return f"{edge.num_bytes / 1e6:.3g} MB{predicted}{why}"


def _seconds(choice: Choice, method: Method) -> float | None:
    return next(way.seconds for way in choice.reasons if way.method == method)
