"""A plan in words: lanes, who stands where, and how each stage is cut into calls."""

from __future__ import annotations

from m2flow.engine.plan import LaneSpec, Plan, StagePlan
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.chunks import window_units
from m2flow.plan.sizes import bytes_text


def describe_plan(plan: Plan, graph: FlowGraph, num_items: int) -> list[str]:
    """Lines for people.

    Args:
        plan, graph: what is to be told.
        num_items: source items of a step.
    """
    several = len({lane.node for lane in plan.lanes}) > 1
    lines = [f"plan: {plan.mode}, {len(plan.lanes)} lane(s), staleness {plan.max_staleness}"]
    for lane in plan.lanes:
        workers = [w for w, spot in plan.placements.items() if lane.id in spot.lanes]
        lines.append(f"  lane {lane.id} ({_where(lane, several)}): {', '.join(workers)}")
    width = max(len(node.name) for node in graph.nodes)
    lines += [f"  {node.name:<{width}}  {_calls(plan, node, num_items)}" for node in graph.nodes]
    for name, edge in plan.edges.items():
        limits = [f"{edge.max_items} items"] if edge.max_items else []
        limits += [f"{edge.max_bytes} bytes"] if edge.max_bytes else []
        limited = f"at most {' and '.join(limits)}" if limits else "no limit"
        lines.append(f"  {name}: {limited}")
    return lines


def _where(lane: LaneSpec, several: bool) -> str:
    """What a lane has: its machine where there are several, its device, its limits."""
    parts = [f"node {lane.node}"] if several else []
    parts.append(f"gpu {lane.gpu}" if lane.gpu is not None else f"cores {list(lane.cores)}")
    if lane.memory_bytes is not None:
        parts.append(f"at most {bytes_text(lane.memory_bytes)}")
    parts += ["a process of its own"] if lane.reserved_for is not None else []
    return ", ".join(parts)


def _calls(plan: Plan, node: StageNode, num_items: int) -> str:
    stage = plan.stages.get(node.name, StagePlan())
    items, window = num_items * node.fanout, window_units(node, num_items)
    chunk = min(stage.chunk or window, window)
    spot = plan.placements[node.worker]
    replicas, size = spot.replicas, len(spot.replicas[0])
    gang = f" of {size} lanes as {spot.layout}" if size > 1 else ""
    text = (
        f"{items} items, {len(replicas)} replica(s){gang}, "
        f"{-(-window // chunk) * node.minibatches} call(s) of {chunk} {node.unit}(s)"
    )
    if node.minibatches > 1:
        filled = ", filled as items arrive" if node.by_arrival else ""
        text += f", {node.minibatches} mini-batches{filled}"
    return text
