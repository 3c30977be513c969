"""`Publisher`: decides on the launcher's side which way each worker's weights travel, and says why.

The way follows from where the two sides are. A target on the lane where the source stands whole
takes the source's own tensors, and nothing is sent. Lanes of the source's node read one snapshot in
shared memory. To each other node a copy is sent once, and passed on there. A lane that was lost
since, and is back, gets a copy of its own. The publisher also keeps who still needs a version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from m2flow.engine.messages import InstallWeights
from m2flow.engine.plan import Plan
from m2flow.flow.graph import FlowGraph
from m2flow.runtime.transport.blocks import MAX_READERS
from m2flow.runtime.weights.exports import Export, Method, Sends

REASONS: Mapping[Method, str] = {
    "shared": "they read one snapshot in shared memory",
    "copy": "each node is sent one copy",
}

Reader = tuple[str, int]
"""A worker that takes weights over, and the lane where it does."""


@dataclass(slots=True)
class _Version:
    """Where one version lies, and how many installs of it are still to come."""

    readers: dict[int, dict[Reader, tuple[Method, int]]]  # by exporting lane: way, number in it
    exports: dict[int, dict[Method, Export]] = field(default_factory=dict)
    left: int = 0
    lost: set[int] = field(default_factory=set)  # readers' lanes that were lost since


@dataclass(slots=True)
class _Edge:
    """A worker that publishes, and everybody who takes its weights over from other lanes."""

    source: str
    lanes: tuple[int, ...]  # which export
    readers: tuple[Reader, ...]
    near: Method
    num_bytes: int = 0
    versions: dict[int, _Version] = field(default_factory=dict)


class Publisher:
    """Plans the exports and installs of a run.

    Args:
        same_node: whether two lanes are on one machine.
        plan: where workers stand.
        graphs: the flow's traced methods, of which the weight edges count.
        link: the one way that payloads take, or None.
    """

    def __init__(
        self,
        same_node: Callable[[int, int], bool],
        plan: Plan,
        graphs: Mapping[str, FlowGraph],
        link: str | None = None,
    ) -> None:
        self._same_node, self._link = same_node, link
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
                copy = link is not None or len(readers) > MAX_READERS
                near: Method = "copy" if copy else "shared"
                self._edges[source] = _Edge(source, tuple(gangs[0]), readers, near)

    # --- which way --------------------------------------------------------------------------------

    def _far(self, edge: _Edge, lane: int | None = None) -> list[Reader]:
        """Lanes that read from another node than the exporting lane's; by default the first's."""
        there = edge.lanes[0] if lane is None else lane
        return [reader for reader in edge.readers if not self._same_node(there, reader[1])]

    def _relay(self, edge: _Edge, lane: int, reader: Reader) -> int | None:
        """The lane that brings weights to a reader's node; None where there is but this reader."""
        beside = [x for _, x in self._far(edge, lane) if self._same_node(x, reader[1])]
        return beside[0] if len(beside) > 1 else None

    def explain(self) -> dict[str, str]:
        """Each way that is taken, once something has been published -> its size, and why."""
        found = {}
        for edge in self._edges.values():
            far = self._far(edge)
            near = [reader for reader in edge.readers if reader not in far]
            for readers, nodes, method in (
                (near, "its node", edge.near),
                (far, "other nodes", "copy"),
            ):
                if readers and edge.num_bytes:
                    names = ", ".join(dict.fromkeys(target for target, _ in readers))
                    lanes = "a lane" if len(readers) == 1 else f"{len(readers)} lanes"
                    way = f"{edge.source} publishes to {names} on {lanes} of {nodes} by {method}"
                    why = REASONS[method] if self._link is None else f"all goes by {self._link}"
                    found[way] = f"{edge.num_bytes / 1e6:.3g} MB ({why})"
        return found

    # --- a version on its way ---------------------------------------------------------------------

    def export(self, source: str, version: int, lanes: Sequence[int]) -> dict[int, Sends]:
        """How each of the lanes is to lay a version out."""
        edge = self._edges[source]
        found: dict[int, Sends] = {}
        state = edge.versions[version] = _Version({}, left=len(edge.readers))
        edge.versions = {n: other for n, other in edge.versions.items() if other.left > 0}
        for lane in lanes:
            far = set(self._far(edge, lane))
            ways: dict[Reader, tuple[Method, int]] = {}
            takers: dict[Method, tuple[int, ...]] = {}
            for reader in edge.readers:
                method: Method = "copy" if reader in far else edge.near
                ways[reader] = method, len(takers.get(method, ()))
                takers[method] = (*takers.get(method, ()), reader[1])
            state.readers[lane] = ways
            found[lane] = Sends(takers, min(edge.versions))
        return found

    def laid_out(self, exports: Sequence[Export]) -> None:
        """Note where a lane has laid its export out."""
        edge = self._edges[exports[0].source]
        state = edge.versions[exports[0].version]
        for export in exports:
            state.exports.setdefault(export.lane, {})[export.method] = export
        if len(state.exports) == len(state.readers):
            ends = [next(iter(by_method.values())) for by_method in state.exports.values()]
            edge.num_bytes = sum(export.num_bytes for export in ends)

    def install(self, command: InstallWeights) -> list[Export]:
        """Where a lane finds the version that it is to install."""
        edge, reader = self._edges[command.source], (command.target, command.lanes[0])
        state = edge.versions[command.version]
        self._installs[command.call] = (command.source, command.version)
        if reader[1] in state.lost:
            return self.copies(command.source, command.version) or []
        found = []
        for lane, ways in state.readers.items():
            method, number = ways[reader]
            via = self._relay(edge, lane, reader) if method == "copy" else None
            found.append(replace(state.exports[lane][method], reader=number, via=via))
        return found

    def lost(self, lane: int) -> None:
        """A lane is gone, with what it had taken over."""
        for edge in self._edges.values():
            for state in edge.versions.values():
                state.lost.add(lane)

    def copies(self, source: str, version: int) -> list[Export] | None:
        """Where a lane that was lost finds a version; None where it is not, or not yet."""
        edge = self._edges.get(source)
        state = None if edge is None else edge.versions.get(version)
        if state is None or len(state.exports) < len(state.readers):
            return None
        found = [next(iter(ways.values())) for ways in state.exports.values()]
        return [replace(one, method="copy", handle=None, via=None) for one in found]

    def has_published(self, source: str) -> bool:
        """Whether any version of a worker's weights was asked for."""
        edge = self._edges.get(source)
        return edge is not None and bool(edge.versions)

    def finished(self, call: int) -> None:
        """Note that a call has ended: an install leaves its version with one reader less."""
        if call in self._installs:
            source, version = self._installs.pop(call)
            self._edges[source].versions[version].left -= 1
