"""From a plan tree to the engine's `Plan`: which lanes, how many units a call, in which order.

The parts of a `Spatial` take lanes of each kind from one end to the other, so that what stands
together in the tree stands together on the machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """What is known of a plan so far."""

    problem: Problem
    placements: dict[str, Placement] = field(default_factory=dict)
    stages: dict[str, StagePlan] = field(default_factory=dict)
    pipelined: bool = False

    def place(self, node: StageNode, number: int, replicas: int, ids: Ids, items: int) -> None:
        """A stage's worker on the first lanes of a kind; a call takes so many items."""
        layout, kind = layout_of(self.problem, node, number)
        gangs = tuple(ids[kind][n * layout.lanes : (n + 1) * layout.lanes] for n in range(replicas))
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


def to_plan(problem: Problem, found: Found, lanes: Sequence[LaneSpec], mode: str = "auto") -> Plan:
    """The engine's plan of a tree.

    Args:
        problem: what was searched.
        found: the tree and its seconds.
        lanes: the lanes, as many of each kind as the problem has.
        mode: the name the plan carries.
    """
    ids = tuple(tuple(lane.id for lane in lanes if lane.kind == kind) for kind in problem.kinds)
    drawn, step = _Drawn(problem), int(problem.num_items)
    if isinstance(found.tree, Steps):
        for part, mine in _dealt(found.tree, ids):
            _draw(drawn, part, mine, step, step)
    else:
        _draw(drawn, found.tree, ids, step, step)
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
            cut = tree.first_lanes
            rest = tree.second_lanes
            first = tuple(own[:n] for own, n in zip(ids, cut, strict=True))
            second = tuple(own[n : n + more] for own, n, more in zip(ids, cut, rest, strict=True))
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
        drawn.stages[node.name] = StagePlan(chunk=size)
        drawn.place(node, number, replicas, tuple(free), size)
        if isinstance(leaf, Split):
            layout, kind = layout_of(problem, node, number)
            free[kind] = free[kind][replicas * layout.lanes :]
