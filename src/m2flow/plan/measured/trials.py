"""Plans under which a flow is measured: few, and together they show what other plans will do.

Every stage is seen on all lanes and on one, in calls of several sizes and on gangs that fit its
worker, and weights on their way between gangs and single lanes; loops fused and taken apart; items
that change lanes half done, where a stage allows it. Lanes of a machine slow each other down, so
calls of one size are seen both with all lanes at work and with few.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from m2flow.engine.fusing import fused_loops
from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.builders import build_plan, placed
from m2flow.plan.chunks import cut
from m2flow.plan.isolation import isolate
from m2flow.plan.switching import with_switch_points
from m2flow.plan.validate import validate

PARTS = (1, 4, 2, 8)
"""Into how many calls a replica's part of a mini-batch is cut, the most telling first."""

GANG_PARTS = (1, 4)
"""The same for gangs."""

SWITCH_AT = 0.7
"""Share of a stage's items that are done when the rest change lanes: so many are left that few
steps tell what taking them up costs."""


FitsGang: TypeAlias = Callable[[str, int], bool]
"""Whether a worker can stand on gangs of so many lanes."""


def no_gangs(_worker: str, _size: int) -> bool:
    """Every replica is a single lane."""
    return False


def trial_plans(
    graph: FlowGraph,
    lanes: Sequence[LaneSpec],
    num_items: int,
    *,
    isolated: Collection[str] = (),
    fits_gang: FitsGang = no_gangs,
) -> list[Plan]:
    """The plans to measure, the most telling first; each is valid, and no two are the same.

    Args:
        graph: of the steps.
        lanes: what there is; what is missing of lanes reserved for a worker is added.
        num_items: source items of a step.
        isolated: workers that get lanes of their own.
        fits_gang: asked of workers and sizes of gangs.
    """
    every, lanes = lanes, [lane for lane in lanes if lane.reserved_for is None]
    together, apart = _together(graph, lanes), _apart(graph, lanes)
    plans = []
    for parts in PARTS:
        plans.append(_plan("together", graph, lanes, num_items, together, parts))
        if len(lanes) > 1:
            plans.append(_plan("apart", graph, lanes, num_items, apart, parts))
        if parts == PARTS[0] and fused_loops(graph, plans[0]):
            plans.append(replace(plans[0], fuse_loops=False))
        if parts == PARTS[1]:
            plans += _gangs(graph, lanes, num_items, fits_gang)
    if len(lanes) > 3:
        plans += _halves(graph, lanes, num_items)
    first = isolate(replace(plans[0], lanes=tuple(every)), isolated)
    half, calls = len(lanes) // 2, PARTS[1]  # as many calls of later stages as in another trial
    plans += with_switch_points(first, graph, (SWITCH_AT,), (half,), num_items, pieces=(calls,))
    everything = first.lanes
    found: list[Plan] = []
    for plan in plans:
        plan = isolate(replace(plan, lanes=everything), isolated)
        validate(plan, graph, num_items, isolated)
        if not any(_same(plan, other) for other in found):
            found.append(plan)
    return found


def _same(one: Plan, other: Plan) -> bool:
    return (one.placements, one.stages, one.fuse_loops) == (
        other.placements,
        other.stages,
        other.fuse_loops,
    )


def _plan(
    name: str,
    graph: FlowGraph,
    lanes: Sequence[LaneSpec],
    num_items: int,
    placements: Mapping[str, Placement],
    parts: int,
) -> Plan:
    """A plan in which each replica takes its part of a mini-batch in so many calls."""
    stages: dict[str, StagePlan] = {}
    for node in graph.nodes:
        calls = len(placements[node.worker].replicas) * parts
        stages[node.name] = cut(node, num_items, calls)
    return Plan(name, tuple(lanes), placements, stages)


def _together(graph: FlowGraph, lanes: Sequence[LaneSpec]) -> dict[str, Placement]:
    """Every worker on every lane."""
    each = Placement(tuple((lane.id,) for lane in lanes))
    return dict.fromkeys(placed(graph), each)


def _apart(graph: FlowGraph, lanes: Sequence[LaneSpec]) -> dict[str, Placement]:
    """One replica of each worker: those that exchange weights, then neighbours, on other lanes."""
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


def _gangs(
    graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int, fits_gang: FitsGang
) -> list[Plan]:
    """Workers that can on gangs of two lanes, of four, and so on.

    Those that stream and the others in turn, and both: publishing is seen from and to either, and
    each worker in calls of two sizes.
    """
    single = {node.worker for node in graph.nodes if node.sticky or node.is_function}
    streams = {node.worker for node in graph.nodes if node.streaming}
    plans, size = [], 2
    while size <= len(lanes):
        if len(lanes) % size == 0:
            gangs = tuple(
                tuple(lane.id for lane in lanes[n : n + size]) for n in range(0, len(lanes), size)
            )
            able = {one for one in set(graph.workers) - single if fits_gang(one, size)}
            first, second = GANG_PARTS
            for some, calls in (
                (able - streams, first),
                (able - streams, second),
                (able & streams, first),
                (able, second),
            ):
                if some:
                    spots = {**_together(graph, lanes), **dict.fromkeys(some, Placement(gangs))}
                    plans.append(_plan("gangs", graph, lanes, num_items, spots, calls))
        size *= 2
    return plans


def _halves(graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int) -> list[Plan]:
    """Half of the lanes for each side, which shows numbers of replicas between one and all."""
    try:
        return [build_plan("disaggregated", graph, lanes, num_items)]
    except UserError:  # there is nothing to put on one of the sides
        return []
