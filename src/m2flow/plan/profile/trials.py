"""Plans under which a flow is measured on purpose: few, and together they show what others will do.

Every stage is seen on all lanes and on some of them, in calls of several sizes and in a layout of
each size that its worker declares, and weights on their way between lanes and layouts; loops are
fused and taken apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from m2flow.engine.loops import fused_loops
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Layout, Worker
from m2flow.plan.builders import build_plan
from m2flow.plan.chunks import spread
from m2flow.plan.isolation import isolate
from m2flow.plan.validate import validate

PARTS = (1, 4, 2, 8)
"""Into how many calls a replica's part of a mini-batch is cut, the most telling first."""


def trial_plans(
    graph: FlowGraph,
    lanes: Sequence[LaneSpec],
    num_items: int,
    *,
    isolated: Collection[str] = (),
    workers: Mapping[str, Worker] = MappingProxyType({}),
) -> list[Plan]:
    """Return the plans to measure, the most telling first; each is valid, and none comes twice.

    Args:
        graph: of the steps.
        lanes: what there is; what is missing of lanes reserved for a worker is added.
        num_items: source items of a step.
        isolated: workers that get lanes of their own.
        workers: of the flow; each is tried in layouts on several lanes that it declares, too.
    """
    free = [lane for lane in lanes if lane.reserved_for is None]
    layouts = {
        name: [one for one in worker.layouts(free[0].kind, len(free)) if one.obstacle() is None]
        for name, worker in workers.items()
        if name in graph.workers
    }
    ways = [("collocated", {}), ("disaggregated", {}), *_laid_out(layouts, len(free))]
    plans = list[Plan]()
    for parts in PARTS:
        for mode, own in ways if parts in PARTS[:2] else ways[:2]:
            with suppress(UserError):  # the mode, or the layout, does not fit these lanes
                plan = build_plan(mode, graph, free, num_items, layouts=own)
                stages = spread(graph, plan.placements, num_items, parts)
                plans.append(replace(plan, stages=stages))
        if parts == PARTS[0] and fused_loops(graph, plans[0]):
            plans.append(replace(plans[0], fuse_loops=False))
    every = isolate(replace(plans[0], lanes=tuple(lanes)), isolated).lanes
    found: dict[tuple[object, ...], Plan] = {}
    for plan in plans:
        plan = isolate(replace(plan, lanes=every), isolated)
        validate(plan, graph, num_items, isolated)
        found.setdefault((str(plan.placements), str(plan.stages), plan.fuse_loops), plan)
    return list(found.values())


def _laid_out(
    layouts: Mapping[str, Sequence[Layout]], num_lanes: int
) -> Iterator[tuple[str, dict[str, Layout]]]:
    """Yield modes and layouts in which a layout of each size is seen alone, and all together.

    Of several layouts of one size it is the one that the worker names first.
    """
    sizes = {one.lanes for known in layouts.values() for one in known}
    for size in sorted(size for size in sizes if size > 1 and num_lanes % size == 0):
        some = {
            worker: next(one for one in known if one.lanes == size)
            for worker, known in layouts.items()
            if any(one.lanes == size for one in known)
        }
        yield from (("collocated", {worker: one}) for worker, one in some.items())
        if len(some) > 1:
            yield "collocated", some
