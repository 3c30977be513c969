"""Which loops run fused: around and around on one lane, with no trip to the controller.

A loop is fused where the plan allows it, all of its members' workers stand on the same single
lanes, fit there together (the limit of a lane is kept), and at most one of them binds items to
lanes: an item can then be handed to a lane once, and stay there until it has left the loop.
"""

from __future__ import annotations

from m2flow.engine.plan import Plan
from m2flow.flow.graph import FlowGraph, StageNode


def fused_loops(graph: FlowGraph, plan: Plan) -> frozenset[int]:
    """Numbers of the loops that run fused under this plan."""
    if not plan.fuse_loops:
        return frozenset()
    loops = range(len(graph.loops))
    return frozenset(loop for loop in loops if _can_be_fused(graph, plan, loop))


def sticky_member(graph: FlowGraph, loop: int) -> StageNode | None:
    """A member that binds items to lanes; in a fused loop all such members have one worker."""
    members = (graph.nodes[index] for index in graph.loops[loop].members)
    return next((node for node in members if node.sticky), None)


def _can_be_fused(graph: FlowGraph, plan: Plan, loop: int) -> bool:
    members = [graph.nodes[index] for index in graph.loops[loop].members]
    spots = {node.worker: plan.placements[node.worker] for node in members}
    first = spots[members[0].worker]
    if any(len(gang) > 1 for gang in first.replicas):
        return False
    if any(set(spot.replicas) != set(first.replicas) for spot in spots.values()):
        return False
    if len({node.worker for node in members if node.sticky}) > 1:
        return False
    needed = sum(spot.state_bytes for spot in spots.values())
    needed += max(spot.working_bytes for spot in spots.values())
    limits = {lane.id: lane.memory_bytes for lane in plan.lanes}
    return all((limit := limits[lane]) is None or needed <= limit for lane in first.lanes)
