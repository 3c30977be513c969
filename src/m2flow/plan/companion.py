"""A plan for another method of the same flow, on the workers where they stand already."""

from __future__ import annotations

from dataclasses import replace

from m2flow.engine.plan import Placement, Plan
from m2flow.flow.graph import FlowGraph
from m2flow.plan.builders import spread


def companion(plan: Plan, graph: FlowGraph, num_items: int) -> Plan:
    """The plan under which `graph` (such as an evaluation) runs beside the steps of `plan`.

    Workers keep their lanes; what the steps do not use stands on the first lane. Every stage is
    spread evenly over the replicas of its worker.

    Args:
        plan: what the steps run under.
        graph: the other method.
        num_items: its source items.
    """
    first = Placement(((plan.lanes[0].id,),))
    placements = {worker: plan.placements.get(worker, first) for worker in graph.workers}
    return replace(
        plan,
        mode=f"{plan.mode} ({graph.name})",
        placements={**plan.placements, **placements},
        stages=spread(graph, placements, num_items),
        edges={},
        order=(),
        max_staleness=0,
        predicted_seconds=None,
    )
