"""Time-varying plans: the same plan with a moment at which lanes pass on from a streaming stage.

Towards the end of a streaming stage most of its replicas run a few long items each. From the switch
point on some replicas run all of them together, and the lanes of the others pass to the stages that
come after. Whether that gains is for a simulation to say; here are the variants worth one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from m2flow.engine.plan import Placement, Plan, StagePlan
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.chunks import PIECES, window_units

SHARES = (0.7, 0.8, 0.9)
"""Shares of a stage's items that are done at its switch point, to be tried."""

FINENESS = (PIECES, 4 * PIECES)
"""Into how many calls a replica's work of a window is cut in later stages, to be tried. The longest
items come last: a call with many of them would keep one lane busy when the others have nothing
left, and so training is cut as finely as the rest."""


def with_switch_points(
    plan: Plan,
    graph: FlowGraph,
    shares: Sequence[float] = SHARES,
    keeps: Sequence[int] | None = None,
    num_items: int | None = None,
    pieces: Sequence[int] = FINENESS,
) -> list[Plan]:
    """The plan with one switch point, for each stage, share, number of replicas and fineness.

    A stage fits if it is resumable and has several replicas of which at least one stands on a lane
    that later stages need too. Replicas that stand alone on theirs come first, so that they are
    kept. Later stages are cut into smaller calls, so that a freed lane has something to do at once
    and to the end, and the stage itself goes first wherever a lane has a choice.

    Args:
        plan: any valid plan; stages of it that have a switch point already keep it.
        graph: its flow.
        shares: of the output items that are done.
        keeps: how many replicas go on; a quarter and a half of them, and one, if left out.
        num_items: source items of a step: without them only calls with a chunk are cut.
        pieces: into how many calls a replica's work of a window is cut in later stages.
    """
    found = []
    for node in graph.nodes:
        spot = plan.placements[node.worker]
        later = _later_lanes(plan, graph, node)
        replicas = sorted(spot.replicas, key=lambda gang: not later.isdisjoint(gang))
        alone = sum(later.isdisjoint(gang) for gang in replicas)
        stage = plan.stages.get(node.name, StagePlan())
        if not node.resumable or alone == len(replicas) or stage.switch_at is not None:
            continue
        several = range(max(1, alone), len(replicas))
        chosen = sorted({1, len(replicas) // 4, len(replicas) // 2} if keeps is None else {*keeps})
        spot = replace(spot, replicas=tuple(replicas))
        for calls in pieces:
            smaller = _cut_smaller(plan, graph, node, num_items, calls)
            found += [
                _with_switch(smaller, node, spot, share, keep)
                for keep in chosen
                if keep in several
                for share in shares
            ]
    return found


def _with_switch(plan: Plan, node: StageNode, spot: Placement, share: float, keep: int) -> Plan:
    stage = replace(plan.stages.get(node.name, StagePlan()), switch_at=share, keep=keep)
    others = plan.order or ()
    return replace(
        plan,
        mode=f"{plan.mode}, switching",
        placements={**plan.placements, node.worker: spot},
        stages={**plan.stages, node.name: stage},
        order=(node.name, *(name for name in others if name != node.name)),
        predicted_seconds=None,
    )


def _later(graph: FlowGraph, node: StageNode) -> list[StageNode]:
    """Stages that come after one, on any way from it."""
    found = {node.index}
    for other in graph.nodes:  # in topological order
        if not found.isdisjoint(other.inputs):
            found.add(other.index)
    return [graph.nodes[index] for index in sorted(found - {node.index})]


def _later_lanes(plan: Plan, graph: FlowGraph, node: StageNode) -> set[int]:
    workers = {other.worker for other in _later(graph, node)} - {node.worker}
    return {lane for worker in workers for lane in plan.placements[worker].lanes}


def _cut_smaller(
    plan: Plan, graph: FlowGraph, node: StageNode, num_items: int | None, pieces: int
) -> Plan:
    """The plan with later stages in so many calls a replica and window, if they have fewer."""
    stages = dict(plan.stages)
    for other in _later(graph, node):
        stage = stages.get(other.name, StagePlan())
        if other.unit == "step" or other.streaming:
            continue
        if num_items is not None:
            calls = len(plan.placements[other.worker].replicas) * pieces
            most = max(1, -(-window_units(other, num_items) // calls))
            stages[other.name] = replace(stage, chunk=min(stage.chunk or most, most))
        elif stage.chunk is not None:
            stages[other.name] = replace(stage, chunk=max(1, -(-stage.chunk // pieces)))
    return replace(plan, stages=stages)
