"""The fixed modes as plans: each builder gives the plan that its name says.

They know the graph and the lanes, and no times. A worker that is trained (the source of a weight
edge, or one with an accumulating stage) belongs to the *training* side; one that runs on published
weights belongs to the *rollout* side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import UserError, suggestion
from m2flow.flow.graph import FlowGraph, StageNode

PIECES = 4
"""Into how many calls a pipelined stage cuts the work of a lane and window."""


def eager(graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int) -> Plan:  # noqa: ARG001 - a builder
    """Everything on one lane, each stage in one call after the other."""
    lane = replace(lanes[0], id=0, cores=tuple(core for lane in lanes for core in lane.cores))
    placements = {worker: Placement(((0,),)) for worker in graph.workers}
    return Plan("eager", (lane,), placements)


def collocated(graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int) -> Plan:
    """Every worker on every lane; each stage is spread over all lanes before the next begins."""
    everywhere = tuple((lane.id,) for lane in lanes)
    placements = {worker: Placement(everywhere) for worker in graph.workers}
    return Plan("collocated", tuple(lanes), placements, spread(graph, placements, num_items))


def disaggregated(graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int) -> Plan:
    """Rollout and training on lanes of their own, joined by a pipeline.

    The lanes are split evenly, the odd one going to the rollout. Whatever is neither generated nor
    trained (verifiers, pure functions) stands beside the training, which is idle at first.
    """
    rollout = {edge.target for edge in graph.weight_edges}
    if not rollout:
        rollout = {node.worker for node in graph.nodes if node.streaming or node.loop is not None}
    if not rollout or len(lanes) < 2:
        reason = "needs two lanes" if rollout else "needs a stage that generates"
        raise UserError(
            f"disaggregated {reason}",
            key="mode",
            value=f"{len(lanes)} lanes",
            hint="use --mode collocated",
        )
    cut = (len(lanes) + 1) // 2
    first = tuple((lane.id,) for lane in lanes[:cut])
    second = tuple((lane.id,) for lane in lanes[cut:])
    placements = {
        worker: Placement(first if worker in rollout else second) for worker in graph.workers
    }
    stages = {}
    for node in graph.nodes:
        replicas = len(placements[node.worker].replicas)
        units = _window_units(node, num_items)
        pieces = replicas if node.streaming else replicas * PIECES
        stages[node.name] = StagePlan(chunk=_share(units, pieces))
    order = tuple(node.name for node in reversed(graph.nodes))
    return Plan("disaggregated", tuple(lanes), placements, stages, order=order)


BUILDERS: Mapping[str, Callable[[FlowGraph, Sequence[LaneSpec], int], Plan]] = {
    "eager": eager,
    "collocated": collocated,
    "disaggregated": disaggregated,
}


def build_plan(mode: str, graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int) -> Plan:
    """The plan of a fixed mode.

    Args:
        mode: one of BUILDERS.
        graph: what is to be planned.
        lanes: what there is.
        num_items: source items of a step.

    Raises:
        UserError: there is no such mode, or it does not fit the graph or the lanes.
    """
    if mode not in BUILDERS:
        raise UserError("is not a mode", key="mode", value=mode, hint=suggestion(mode, BUILDERS))
    return BUILDERS[mode](graph, lanes, num_items)


def spread(
    graph: FlowGraph, placements: Mapping[str, Placement], num_items: int
) -> dict[str, StagePlan]:
    """Chunks with which each replica of a stage has one call in a window."""
    return {
        node.name: StagePlan(
            chunk=_share(_window_units(node, num_items), len(placements[node.worker].replicas))
        )
        for node in graph.nodes
    }


def _window_units(node: StageNode, num_items: int) -> int:
    """Units that a stage has to do in one mini-batch."""
    items = num_items * node.fanout
    unit_items = {"item": 1, "group": node.group_size, "step": items}[node.unit]
    return items // unit_items // node.minibatches


def _share(units: int, pieces: int) -> int:
    return max(1, -(-units // pieces))
