"""From a plan tree to the engine's `Plan`: which lanes, how many units a call, in which order.

The parts of a `Spatial` take lanes of each kind from one end to the other, so that what stands
together in the tree stands together on the machines. Which part begins is open: a gang that a
machine can hold should not stand on two, as its price is that of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.flow.graph import StageNode
from m2flow.plan.search.choose import Found
from m2flow.plan.search.leaves import layout_of, share_of, units
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.tree import Chunked, Fused, Leaf, Spatial, Split, Steps, Temporal, Tree
from m2flow.plan.units import Bytes, Items

Ids = tuple[tuple[int, ...], ...]
"""Lane numbers by kind."""


@dataclass
class _Drawn:
    """What is known of a plan so far.

    Attributes:
        problem: what was searched.
        machines: the machine of each lane.
        turned: for each `Spatial` from the root on whether its second part begins.
    """

    problem: Problem
    machines: Mapping[int, int]
    turned: Iterator[bool]
    placements: dict[str, Placement] = field(default_factory=dict)
    stages: dict[str, StagePlan] = field(default_factory=dict)
    pipelined: bool = False

    def place(
        self, node: StageNode, number: int, replicas: int, ids: Ids, items: int
    ) -> tuple[int, ...]:
        """A stage's worker on lanes of a kind, the first that will do; a call takes so many items.

        Returns:
            the lanes.
        """
        layout, kind = layout_of(self.problem, node, number)
        gangs = self._gangs(ids[kind], layout.lanes)[:replicas]
        known = self.placements.get(node.worker)
        assert known is None or known.replicas == gangs, f"{node.worker} stands in two places"
        working = layout.working_bytes(Items(items))
        _, _, size = self.problem.state(node.worker, layout.lanes, kind)
        for companion in self.problem.companions.get(node.worker, ()):
            state = self.problem.profile.worker(companion, layout.lanes, layout.kind)
            small = state.state_bytes if state else 0
            size = Bytes(size - small)
            self.placements[companion] = Placement(gangs, small)
        if known is not None:
            working = Bytes(max(working, known.working_bytes))
        self.placements[node.worker] = Placement(gangs, size, working)
        return self.placements[node.worker].lanes

    def _gangs(self, ids: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
        """Gangs of so many lanes: first those that stand on one machine, then of what is left."""
        alike: dict[int, list[int]] = {}
        for lane in ids:
            alike.setdefault(self.machines[lane], []).append(lane)
        whole = [gang for lanes in alike.values() for gang in _cut(lanes, size)]
        used = {lane for gang in whole for lane in gang}
        return (*whole, *_cut([lane for lane in ids if lane not in used], size))

    def torn(self) -> int:
        """Gangs on several machines."""
        spots = [gang for spot in self.placements.values() for gang in spot.replicas]
        return sum(len({self.machines[lane] for lane in gang}) > 1 for gang in spots)


def _cut(ids: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Neighbours in gangs of so many; who is left over is left out."""
    return [tuple(ids[n : n + size]) for n in range(0, len(ids) - size + 1, size)]


def to_plan(problem: Problem, found: Found, lanes: Sequence[LaneSpec], mode: str = "auto") -> Plan:
    """The engine's plan of a tree.

    Args:
        problem: what was searched.
        found: the tree and its seconds.
        lanes: the lanes, as many of each kind as the problem has.
        mode: the name the plan carries.
    """
    drawn = _least_torn(problem, found.tree, lanes)
    downstream_first = drawn.pipelined or isinstance(found.tree, Steps)
    order = tuple(node.name for node in reversed(problem.graph.nodes)) if downstream_first else ()
    return Plan(
        mode,
        tuple(lanes),
        drawn.placements,
        drawn.stages,
        order=order,
        max_staleness=found.staleness,
        predicted_seconds=float(found.seconds),
    )


def _least_torn(problem: Problem, tree: Tree, lanes: Sequence[LaneSpec]) -> _Drawn:
    """The tree on lanes, its parts in the order that keeps most gangs on a machine each."""
    ids = tuple(tuple(lane.id for lane in lanes if lane.kind == kind) for kind in problem.kinds)
    machines, step = {lane.id: lane.node for lane in lanes}, int(problem.num_items)
    found: list[_Drawn] = []
    for turned in product((False, True), repeat=_parted(tree)):
        drawn = _Drawn(problem, machines, iter(turned))
        parts = _dealt(tree, ids) if isinstance(tree, Steps) else [(tree, ids)]
        for part, mine in parts:
            _draw(drawn, part, mine, step, step)
        found.append(drawn)
        if not drawn.torn():
            break
    return min(found, key=_Drawn.torn)


def _parted(tree: Tree) -> int:
    """How often a tree is parted into lanes."""
    match tree:
        case Spatial():
            return 1 + _parted(tree.first) + _parted(tree.second)
        case Temporal():
            return _parted(tree.first) + _parted(tree.second)
        case Chunked():
            return _parted(tree.inner)
        case Steps():
            return sum(map(_parted, tree.parts))
    return 0


def _dealt(tree: Steps, ids: Ids) -> list[tuple[Tree, Ids]]:
    start, parts = [0] * len(ids), []
    for part, lanes in zip(tree.parts, tree.lanes, strict=True):
        mine = tuple(own[at : at + n] for own, at, n in zip(ids, start, lanes, strict=True))
        start = [at + n for at, n in zip(start, lanes, strict=True)]
        parts.append((part, mine))
    return parts


def _draw(drawn: _Drawn, tree: Tree, ids: Ids, round_size: int, chunk: int) -> None:
    match tree:
        case Chunked():
            drawn.pipelined = True
            _draw(drawn, tree.inner, ids, round_size, tree.chunk)
        case Temporal():
            _draw(drawn, tree.first, ids, chunk, chunk)
            _draw(drawn, tree.second, ids, chunk, chunk)
        case Spatial():
            counts = tree.first_lanes, tree.second_lanes
            turned = next(drawn.turned)
            begins, then = reversed(counts) if turned else counts
            parts = [tuple(own[:n] for own, n in zip(ids, begins, strict=True))]
            rest = zip(ids, begins, then, strict=True)
            parts.append(tuple(own[n : n + more] for own, n, more in rest))
            first, second = reversed(parts) if turned else parts
            _draw(drawn, tree.first, first, round_size, chunk)
            _draw(drawn, tree.second, second, round_size, chunk)
        case Leaf():
            _draw_stage(drawn, tree, ids, round_size, chunk)
        case Fused() | Split():
            _draw_loop(drawn, tree, ids, chunk)
        case Steps():
            raise AssertionError("steps overlap at the root only")


def _draw_stage(drawn: _Drawn, leaf: Leaf, ids: Ids, round_size: int, chunk: int) -> None:
    problem = drawn.problem
    node = problem.tasks[leaf.task].nodes[0]
    layout, _ = layout_of(problem, node, leaf.layout)
    window = int(problem.num_items) // node.minibatches
    source = round_size if node.streaming else min(window, chunk)
    share, unit_items = share_of(node, source, leaf.replicas)
    size = -(-share // leaf.calls)
    running = layout.max_running if node.streaming else None
    drawn.stages[node.name] = StagePlan(chunk=size, max_running=running)
    drawn.place(node, leaf.layout, leaf.replicas, ids, size * unit_items)


def _draw_loop(drawn: _Drawn, leaf: Fused | Split, ids: Ids, chunk: int) -> None:
    problem = drawn.problem
    nodes = problem.tasks[leaf.task].nodes
    groups = leaf.groups if isinstance(leaf, Split) else 1
    free = list(ids)
    for n, (node, number) in enumerate(zip(nodes, leaf.layouts, strict=True)):
        replicas = leaf.replicas[n] if isinstance(leaf, Split) else leaf.replicas
        group = -(-units(node, chunk)[0] // groups)
        size = -(-group // replicas)
        if isinstance(leaf, Split):
            size = _without_rest(group, size)
        drawn.stages[node.name] = StagePlan(chunk=size)
        taken = set(drawn.place(node, number, replicas, tuple(free), size))
        if isinstance(leaf, Split):
            free = [tuple(lane for lane in own if lane not in taken) for own in free]


def _without_rest(group: int, share: int) -> int:
    """The largest calls, down to half of a share, in which a group leaves no rest: between members
    of a cycle that stand apart a rest would wait for items of the next turn."""
    return next((size for size in range(share, (share - 1) // 2, -1) if not group % size), share)
