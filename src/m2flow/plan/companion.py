"""A plan for another method of the same flow, on the workers where they stand already."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from m2flow.engine.plan import Placement, Plan
from m2flow.flow.graph import FlowGraph
from m2flow.plan.builders import placed
from m2flow.plan.chunks import spread
from m2flow.plan.isolation import isolate


def companion(plan: Plan, graph: FlowGraph, num_items: int, isolated: Collection[str] = ()) -> Plan:
    """The plan under which `graph` (such as an evaluation) runs beside the steps of `plan`.

    Workers keep their lanes; what the steps do not use stands on the first lane that is not
    reserved, or beside it, where it must have a process of its own: the plan has more lanes then.
    Every stage is spread evenly over the replicas of its worker.

    Args:
        plan: what the steps run under.
        graph: the other method.
        num_items: its source items.
        isolated: workers that must have a process of their own.
    """
    first = next(lane.id for lane in plan.lanes if lane.reserved_for is None)
    stands = {worker: Placement(((first,),)) for worker in placed(graph)}
    placements = {**stands, **plan.placements}
    beside = replace(
        plan,
        mode=f"{plan.mode} ({graph.name})",
        placements=placements,
        stages=spread(graph, placements, num_items),
        edges={},
        order=(),
        max_staleness=0,
        predicted_seconds=None,
    )
    return isolate(beside, set(isolated) - plan.placements.keys())
