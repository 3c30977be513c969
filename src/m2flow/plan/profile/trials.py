"""Plans under which a flow is measured on purpose: few, and together they show what others will do.

Every stage is seen on all lanes and on one, in calls of several sizes and in every layout that its
worker declares, and weights on their way between layouts; loops are fused and taken apart. Lanes of
a machine slow each other down, so calls of one size are seen with all lanes at work and with few.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from m2flow.engine.loops import fused_loops
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Layout
from m2flow.plan.builders import build_plan, placed
from m2flow.plan.chunks import cut
from m2flow.plan.isolation import isolate
from m2flow.plan.validate import validate

PARTS = (1, 4, 2, 8)
"""Into how many calls a replica's part of a mini-batch is cut, the most telling first."""


def declared(
    graph: FlowGraph, workers: Mapping[str, object], lanes: Sequence[LaneSpec]
) -> dict[str, list[Layout]]:
    """Return the layouts on several lanes that workers declare for these lanes, and can have."""
    found = {}
    for name, worker in workers.items():
        ask = getattr(worker, "layouts", None)
        known = ask(lanes[0].kind, len(lanes)) if ask is not None else ()
        fitting = [one for one in known if 1 < one.lanes <= len(lanes) and one.obstacle() is None]
        if name in graph.workers and fitting:
            found[name] = fitting
    return found


def trial_plans(
    graph: FlowGraph,
    lanes: Sequence[LaneSpec],
    num_items: int,
    *,
    isolated: Collection[str] = (),
    layouts: Mapping[str, Sequence[Layout]] | None = None,
) -> list[Plan]:
    """Return the plans to measure, the most telling first; each is valid, and none comes twice.

    Args:
        graph: of the steps.
        lanes: what there is; what is missing of lanes reserved for a worker is added.
        num_items: source items of a step.
        isolated: workers that get lanes of their own.
        layouts: by worker, what it can have beside a single lane; see `declared`.
    """
    every, lanes = lanes, [lane for lane in lanes if lane.reserved_for is None]
    together = {worker: _replicas(Layout(), lanes) for worker in placed(graph)}

    def trial(name: str, placements: Mapping[str, Placement], parts: int) -> Plan:
        stages = {
            node.name: cut(node, num_items, len(placements[node.worker].replicas) * parts)
            for node in graph.nodes
        }
        return Plan(name, tuple(lanes), placements, stages)

    plans = []
    for parts in PARTS:
        plans.append(trial("together", together, parts))
        if len(lanes) > 1:
            plans.append(trial("apart", _apart(graph, lanes), parts))
        if parts == PARTS[0] and fused_loops(graph, plans[0]):
            plans.append(replace(plans[0], fuse_loops=False))
        if parts in PARTS[:2]:
            plans += [
                trial("layouts", {**together, **spots}, parts)
                for spots in _laid_out(layouts or {}, lanes)
            ]
    if len(lanes) > 3:
        with suppress(UserError):  # there is nothing to put on one of the sides
            plans.append(build_plan("disaggregated", graph, lanes, num_items))
    everything = isolate(replace(plans[0], lanes=tuple(every)), isolated).lanes
    found: dict[tuple[object, ...], Plan] = {}
    for plan in plans:
        plan = isolate(replace(plan, lanes=everything), isolated)
        validate(plan, graph, num_items, isolated)
        found.setdefault((str(plan.placements), str(plan.stages), plan.fuse_loops), plan)
    return list(found.values())


def _replicas(layout: Layout, lanes: Sequence[LaneSpec]) -> Placement:
    """Fill the lanes with replicas."""
    starts = range(0, len(lanes) - layout.lanes + 1, layout.lanes)
    gangs = (tuple(lane.id for lane in lanes[n : n + layout.lanes]) for n in starts)
    return Placement(tuple(gangs), layout=layout.name)


def _apart(graph: FlowGraph, lanes: Sequence[LaneSpec]) -> dict[str, Placement]:
    """Put one replica of each worker on a lane, those that exchange weights on other lanes."""
    exchange = {(edge.source, edge.target) for edge in graph.weight_edges}
    spots: dict[str, int] = {}
    for worker in placed(graph):
        mates = {spots[other] for other in spots if {(worker, other), (other, worker)} & exchange}
        neighbour, used = next(reversed(spots.values()), None), list(spots.values())
        spots[worker] = min(
            (lane.id for lane in lanes),
            key=lambda x: (x in mates, x == neighbour, used.count(x)),
        )
    return {worker: Placement(((lane,),)) for worker, lane in spots.items()}


def _laid_out(
    layouts: Mapping[str, Sequence[Layout]], lanes: Sequence[LaneSpec]
) -> list[dict[str, Placement]]:
    """Return placements in which each layout is seen alone, and all of one size together."""
    found = []
    for size in sorted({one.lanes for known in layouts.values() for one in known}):
        spots = {
            worker: _replicas(one, lanes)
            for worker, known in layouts.items()
            for one in known
            if one.lanes == size and len(lanes) % size == 0
        }
        found += [{worker: spot} for worker, spot in spots.items()]
        found += [spots] if len(spots) > 1 else []
    return found
