"""What is searched: a flow's graph with its cycles condensed, its profile, the lanes, the menus.

A *task* is a stage, or all stages of one cycle. Sets of tasks are bit masks. Lanes are told apart
by their kind only, so a part of them is a tuple of counts, one for each kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode, WeightEdge
from m2flow.plan.profile import Profile, StageCost
from m2flow.plan.search.menus import CALLS, FINE, GROUPS, MAX_CHUNKS, MORE_CHUNKS, chunk_sizes
from m2flow.plan.units import Bytes, Items, Seconds, SourceItems, size_of

Lanes = tuple[int, ...]
"""So many lanes of each kind."""

PARTS = 128
"""Into how many parts a lane's memory is counted; a power of two, so that sums are exact."""


@dataclass(frozen=True)
class Limits:
    """What there is of resources that belong to no single lane, and what may be asked of a plan.

    Attributes:
        cores: CPU cores for stages that need some beside their lanes' own; None for no limit.
        host_bytes: memory of the machines for calls and states that are offloaded.
        lanes_per_node: lanes of one machine; None if all are on one.
    """

    cores: float | None = None
    host_bytes: Bytes | None = None
    lanes_per_node: int | None = None


@dataclass(frozen=True)
class Task:
    """A stage, or the members of a cycle in their order.

    Attributes:
        nodes: the stages.
        before: tasks that make its inputs, as a mask.
    """

    nodes: tuple[StageNode, ...]
    before: int

    @property
    def is_loop(self) -> bool:
        return len(self.nodes) > 1

    @property
    def streaming(self) -> bool:
        return not self.is_loop and self.nodes[0].streaming


@dataclass(frozen=True)
class Problem:
    """A search: everything it may know. Make one with `problem`.

    Attributes:
        graph, profile: the flow and its prices.
        num_items: source items of a step.
        tasks: condensed graph, in topological order.
        kinds: names of the lanes' kinds.
        lanes: how many there are of each.
        memory: bytes of a lane of each kind; None for no limit.
        chunks: sizes into which a step may be cut, largest first; each divides the one before.
        calls, groups: see CALLS and GROUPS.
    """

    graph: FlowGraph
    profile: Profile
    num_items: SourceItems
    tasks: tuple[Task, ...]
    kinds: tuple[str, ...]
    lanes: Lanes
    memory: tuple[Bytes | None, ...]
    chunks: tuple[SourceItems, ...]
    limits: Limits = field(default_factory=Limits)
    calls: tuple[int, ...] = CALLS
    groups: tuple[int, ...] = GROUPS

    @property
    def everything(self) -> int:
        """The mask of all tasks."""
        return (1 << len(self.tasks)) - 1

    @cached_property
    def tasks_of(self) -> Mapping[str, int]:
        """For each worker the tasks that run on it."""
        masks: dict[str, int] = {}
        for index, task in enumerate(self.tasks):
            for node in task.nodes:
                masks[node.worker] = masks.get(node.worker, 0) | 1 << index
        return masks

    @cached_property
    def weight_edges(self) -> tuple[WeightEdge, ...]:
        """Weight edges between two workers of the step."""
        known = self.tasks_of
        return tuple(
            edge
            for edge in self.graph.weight_edges
            if edge.source in known and edge.target in known and edge.source != edge.target
        )

    @cached_property
    def companions(self) -> Mapping[str, tuple[str, ...]]:
        """For each worker those that only take its weights, and stand where it does."""
        found: dict[str, list[str]] = {}
        for edge in self.graph.weight_edges:
            if edge.target not in self.tasks_of:
                found.setdefault(edge.source, []).append(edge.target)
        return {worker: tuple(dict.fromkeys(names)) for worker, names in found.items()}

    def layouts(self, node: StageNode) -> tuple[tuple[int, StageCost, int], ...]:
        """Ways to run a stage: number in its profile, layout, kind of lane.

        Leaves out those of kinds that are not here, those in which the worker's state was never
        laid out, and gangs of sticky stages and streaming functions, which need single lanes.
        """
        known = self._layouts.get(node.index)
        if known is not None:
            return known
        single = node.sticky or (node.streaming and node.is_function)
        found = tuple(
            (number, layout, self.kinds.index(layout.kind))
            for number, layout in enumerate(self.profile.stage(node.name).costs)
            if layout.kind in self.kinds
            and self.profile.worker(node.worker, layout.lanes, layout.kind) is not None
            and not (layout.lanes > 1 and single)
        )
        self._layouts[node.index] = found
        return found

    @cached_property
    def _layouts(self) -> dict[int, tuple[tuple[int, StageCost, int], ...]]:
        return {}

    @cached_property
    def _states(self) -> dict[tuple[str, int, int], tuple[float, Seconds, Bytes]]:
        return {}

    def worker_layouts(self, worker: str) -> tuple[tuple[int, int], ...]:
        """(lanes of a replica, kind) in which all stages of a worker can run."""
        nodes = [n for task in self.tasks for n in task.nodes if n.worker == worker]
        sets = [{(lay.lanes, kind) for _, lay, kind in self.layouts(node)} for node in nodes]
        return tuple(sorted(set.intersection(*sets)))

    def state(self, worker: str, lanes: int, kind: int) -> tuple[float, Seconds, Bytes]:
        """A worker's state, with that of its companions, on a replica of so many lanes.

        Returns:
            share of a lane's memory (0 where it has no limit), seconds to bring and take it away,
            bytes on each lane.
        """
        key = (worker, lanes, kind)
        if key in self._states:
            return self._states[key]
        size, switch = 0, 0.0
        for name in (worker, *self.companions.get(worker, ())):
            layout = self.profile.worker(name, lanes, self.kinds[kind])
            if layout is not None:
                size += layout.state_bytes
                switch += layout.switch
        found = self.share(Bytes(size), kind), Seconds(switch), Bytes(size)
        self._states[key] = found
        return found

    def share(self, size: Bytes, kind: int) -> float:
        """Bytes as a share of a lane's memory, rounded up to PARTS; 0 where it has no limit."""
        limit = self.memory[kind]
        if limit is None or not size:
            return 0.0
        return -(-size * PARTS // limit) / PARTS if limit else math.inf

    def crossing(self, first: int, second: int) -> tuple[bool, int]:
        """Whether stages of the second part read from the first, and bytes for a source item."""
        size, crosses = 0, False
        index_of = {n.index: i for i, task in enumerate(self.tasks) for n in task.nodes}
        for producer in {p for p, c in self.graph.edges if p != SOURCE}:
            readers = [c for p, c in self.graph.edges if p == producer]
            if first >> index_of[producer] & 1 and any(second >> index_of[c] & 1 for c in readers):
                crosses, node = True, self.graph.nodes[producer]
                each = self.profile.stage(node.name).output_bytes
                size += size_of(Items(node.fanout * node.expands), each)
        return crosses, size

    def link_seconds(self, size: int, first: int, second: int) -> float:
        """So many bytes from so many lanes to so many others, over as many links as the fewer."""
        link = self.profile.links.get(self.place(first + second))
        if link is None or not size:
            return 0.0
        return link.latency + size / (link.rate * min(first, second))

    def place(self, lanes: int) -> str:
        """Whether so many lanes are on one machine."""
        per_node = self.limits.lanes_per_node
        return "node" if per_node is None or lanes <= per_node else "cluster"


def problem(
    graph: FlowGraph,
    profile: Profile,
    lanes: Sequence[LaneSpec] | Mapping[str, int],
    num_items: int,
    limits: Limits | None = None,
    memory: Mapping[str, int] | None = None,
    max_chunks: int | None = None,
    calls: tuple[int, ...] = CALLS,
) -> Problem:
    """State a search.

    Args:
        graph, profile: the flow and its prices.
        lanes: those there are, or how many of each kind.
        num_items: source items of a step.
        limits: resources that belong to no lane.
        memory: bytes of a lane by kind, where `lanes` are counts; a kind left out has no limit.
        max_chunks: the most chunks of a step; by default MAX_CHUNKS or MORE_CHUNKS.
        calls: see CALLS.

    Raises:
        UserError: there is no lane, or a stage has no layout that these lanes can carry.
    """
    if isinstance(lanes, Mapping):
        counts, sizes = dict(lanes), dict(memory or {})
    else:
        counts, sizes = {}, {}
        for lane in lanes:
            counts[lane.kind] = counts.get(lane.kind, 0) + 1
            if lane.memory_bytes is not None:
                sizes[lane.kind] = min(lane.memory_bytes, sizes.get(lane.kind, lane.memory_bytes))
    kinds = tuple(sorted(kind for kind, count in counts.items() if count))
    if not kinds or num_items < 1:
        raise UserError("a plan needs a lane and an item", key="lanes", value=dict(counts))
    usual = MAX_CHUNKS if sum(counts.values()) <= FINE else MORE_CHUNKS
    found = Problem(
        graph,
        profile,
        SourceItems(num_items),
        _condensed(graph),
        kinds,
        tuple(counts[kind] for kind in kinds),
        tuple(Bytes(sizes[kind]) if kind in sizes else None for kind in kinds),
        chunk_sizes(graph, num_items, max_chunks or usual),
        limits or Limits(),
        calls,
    )
    for node in graph.nodes:
        _check_layouts(found, node)
    return found


def _check_layouts(stated: Problem, node: StageNode) -> None:
    """Refuse a stage that no lane here can run."""
    layouts = stated.layouts(node)
    if any(layout.lanes <= stated.lanes[kind] for _, layout, kind in layouts):
        return
    if layouts:
        least = min(layout.lanes for _, layout, _ in layouts)
        words = {f"at least {least} {lay.kind}" for _, lay, _ in layouts if lay.lanes == least}
        expected = " or ".join(sorted(words))
    else:
        kinds = sorted({layout.kind for layout in stated.profile.stage(node.name).costs})
        expected = f"lanes of kind {' or '.join(kinds)} for which the state of its worker is known"
    raise UserError(
        "has no layout in the profile that these lanes can carry",
        key=node.name,
        value=dict(zip(stated.kinds, stated.lanes, strict=True)),
        expected=expected,
    )


def _condensed(graph: FlowGraph) -> tuple[Task, ...]:
    components = graph.components()
    where = {index: n for n, component in enumerate(components) for index in component}
    tasks = []
    for n, component in enumerate(components):
        before = {
            where[producer]
            for producer, consumer in graph.edges
            if producer != SOURCE and where[consumer] == n and where[producer] != n
        }
        nodes = tuple(graph.nodes[index] for index in component)
        tasks.append(Task(nodes, sum(1 << index for index in before)))
    return tuple(tasks)
