"""Finer plans: the same plan with one stage in calls of half the size.

A stage on other lanes than one before it begins sooner with smaller calls, and has less left
to do when they have ended; but every call has its price. The search weighs that for chunks that
pass through all stages alike. Which single stage gains is for a simulation to say.
"""

from __future__ import annotations

from dataclasses import replace

from m2flow.engine.plan import Plan
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode

FINER = ", finer"
"""What the name of such a plan ends with."""


def finer(plan: Plan, graph: FlowGraph) -> list[Plan]:
    """The plan once for each stage that can overlap with one before it: its calls halved."""
    found = []
    for node in graph.nodes:
        stage = plan.stages.get(node.name)
        if stage is None or stage.chunk is None or stage.chunk < 2:
            continue
        if node.unit == "step" or node.streaming or node.loop is not None:
            continue
        if _can_overlap(plan, graph, node):
            smaller = replace(stage, chunk=-(-stage.chunk // 2))
            found.append(
                replace(
                    plan,
                    mode=plan.mode.removesuffix(FINER) + FINER,
                    stages={**plan.stages, node.name: smaller},
                    predicted_seconds=None,
                )
            )
    return found


def _can_overlap(plan: Plan, graph: FlowGraph, node: StageNode) -> bool:
    """Whether a stage that comes before, at any distance, stands on other lanes."""
    own, makers = plan.placements[node.worker].lanes, [node]
    for maker in makers:
        if set(plan.placements[maker.worker].lanes) != set(own):
            return True
        makers += (graph.nodes[index] for index in maker.inputs if index != SOURCE)
    return False
