"""`Publisher`: decides on the launcher's side which way each worker's weights travel, and says why.

The way follows from where the two sides are. A target on the lane where the source stands whole
takes the source's own tensors, and nothing is sent. Any other asks the exporting lanes, as for any
payload: on their node it reads their snapshot in shared memory. To each other node a copy is sent
once, and passed on there. The publisher also keeps who still needs a version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from m2flow.engine.messages import InstallWeights
from m2flow.engine.plan import Plan
from m2flow.flow.graph import FlowGraph
from m2flow.runtime.weights.exports import Export, Sends


@dataclass(slots=True)
class _Version:
    """Where one version lies, and how many installs of it are still to come."""

    left: int
    exports: dict[int, Export] = field(default_factory=dict)


@dataclass(slots=True)
class _Edge:
    """A worker that publishes, and everybody who takes its weights over from other lanes.

    Attributes:
        source: the worker.
        lanes: those which export.
        readers: (worker, lane) of all who take over.
        num_bytes: of the newest version that was laid out.
        versions: those that somebody has still to install, and the newest.
    """

    source: str
    lanes: tuple[int, ...]
    readers: tuple[tuple[str, int], ...]
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
        self._lost: set[int] = set()
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
                self._edges[source] = _Edge(source, tuple(gangs[0]), readers)

    def _relay(self, edge: _Edge, lane: int, reader: int) -> int | None:
        """The lane that brings weights to a reader's node; None where the reader does itself.

        A lane that was lost is none under this plan: others would wait for it while it comes back.
        """
        if self._same_node(lane, reader):
            return None
        beside = [x for _, x in edge.readers if self._same_node(x, reader)]
        trusted = [x for x in beside if x not in self._lost]
        return trusted[0] if trusted and len(beside) > 1 else None

    def explain(self) -> dict[str, str]:
        """Each way that is taken, once something has been published -> its size, and why."""
        found = {}
        for edge in self._edges.values():
            near = [one for one in edge.readers if self._same_node(edge.lanes[0], one[1])]
            far = [one for one in edge.readers if one not in near]
            for readers, nodes, method, reason in (
                (near, "its node", "shared", "they read one snapshot in shared memory"),
                (far, "other nodes", "copy", "each node is sent one copy"),
            ):
                if readers and edge.num_bytes:
                    names = ", ".join(dict.fromkeys(target for target, _ in readers))
                    lanes = "a lane" if len(readers) == 1 else f"{len(readers)} lanes"
                    how = method if self._link is None else "copy"
                    way = f"{edge.source} publishes to {names} on {lanes} of {nodes} by {how}"
                    why = reason if self._link is None else f"all goes by {self._link}"
                    found[way] = f"{edge.num_bytes / 1e6:.3g} MB ({why})"
        return found

    # --- a version on its way ---------------------------------------------------------------------

    def export(self, source: str, version: int, lanes: Sequence[int]) -> dict[int, Sends]:
        """What each of the lanes is told that is to lay a version out."""
        edge = self._edges[source]
        edge.versions[version] = _Version(len(edge.readers))
        edge.versions = {n: other for n, other in edge.versions.items() if other.left > 0}
        return dict.fromkeys(lanes, Sends(min(edge.versions)))

    def laid_out(self, exports: Sequence[Export]) -> None:
        """Note where lanes have laid a version out."""
        for export in exports:
            edge = self._edges[export.source]
            there = edge.versions[export.version].exports
            there[export.lane] = export
            if len(there) == len(edge.lanes):
                edge.num_bytes = sum(one.num_bytes for one in there.values())

    def install(self, command: InstallWeights) -> list[Export]:
        """Where a lane finds the version that it is to install."""
        edge, (lane,) = self._edges[command.source], command.lanes
        self._installs[command.call] = (command.source, command.version)
        exports = edge.versions[command.version].exports.values()
        return [replace(one, via=self._relay(edge, one.lane, lane)) for one in exports]

    def lost(self, lane: int) -> None:
        """A lane is gone, with what it had taken over."""
        self._lost.add(lane)

    def copies(self, source: str, version: int) -> list[Export] | None:
        """Where a lane that was lost finds a version; None where it is not, or not yet."""
        edge = self._edges.get(source)
        state = None if edge is None else edge.versions.get(version)
        if edge is None or state is None or len(state.exports) < len(edge.lanes):
            return None
        return list(state.exports.values())

    def has_published(self, source: str) -> bool:
        """Whether any version of a worker's weights was asked for."""
        edge = self._edges.get(source)
        return edge is not None and bool(edge.versions)

    def finished(self, call: int) -> None:
        """Note that a call has ended: an install leaves its version with one reader less."""
        if call in self._installs:
            source, version = self._installs.pop(call)
            self._edges[source].versions[version].left -= 1
