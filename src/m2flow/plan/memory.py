"""Lanes with a memory limit: what must be there at one moment, and whether it fits.

The engine moves states so that a limit is kept, but it cannot part what one command needs together:
a worker's state and what a call of it takes; the two ends of a weight edge on one lane, while the
one hands its weights to the other. (A loop whose members do not fit on their lane together goes
round there stage by stage.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from m2flow.engine.plan import Plan
from m2flow.errors import PlanError
from m2flow.flow.graph import FlowGraph


@dataclass(frozen=True, slots=True)
class Need:
    """What one command needs on a lane.

    Attributes:
        lane: the lane's number.
        workers: whose states must be there together; the last one is who needs the others.
        state_bytes: of all of them.
        working_bytes: of the call.
    """

    lane: int
    workers: tuple[str, ...]
    state_bytes: int
    working_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.state_bytes + self.working_bytes


def needs(plan: Plan, graph: FlowGraph) -> list[Need]:
    """What the commands of a run need on the lanes, each command's workers together."""
    spots = plan.placements
    found = [
        Need(lane, (worker,), spot.state_bytes, spot.working_bytes)
        for worker, spot in spots.items()
        for lane in spot.lanes
    ]
    for edge in graph.weight_edges:
        if edge.source in spots and edge.target in spots:
            source, target = spots[edge.source], spots[edge.target]
            states = source.state_bytes + target.state_bytes
            found += [
                Need(lane, (edge.source, edge.target), states, 0)
                for lane in target.lanes
                if lane in source.lanes
            ]
    return found


def too_large(plan: Plan, graph: FlowGraph) -> Iterator[Need]:
    """Yield the needs for which their lane has too little memory."""
    limits = {lane.id: inf if (room := lane.memory_bytes) is None else room for lane in plan.lanes}
    return (need for need in needs(plan, graph) if need.num_bytes > limits[need.lane])


def check_memory(plan: Plan, graph: FlowGraph) -> None:
    """Refuse a plan whose lanes cannot hold what a command needs.

    Raises:
        PlanError: names the worker, its bytes and the lane.
    """
    for need in too_large(plan, graph):
        limit = next(lane.memory_bytes for lane in plan.lanes if lane.id == need.lane)
        what = "its state does"
        if need.working_bytes:
            working = f"{need.working_bytes} bytes that a call takes"
            what = f"its state of {need.state_bytes} bytes and the {working} do"
        beside = "".join(f" beside {one}'s, whose weights it takes" for one in need.workers[:-1])
        raise PlanError(
            f"{what} not fit on lane {need.lane}{beside}",
            key=f"placements.{need.workers[-1]}",
            value=need.num_bytes,
            expected=f"at most {limit} bytes",
            hint="give the lane more memory or spread the worker over more lanes",
        )


def with_sizes(
    plan: Plan, state_bytes: Mapping[str, int], working_bytes: Mapping[str, int]
) -> Plan:
    """The plan with what is known of its workers' sizes; those left out keep what they have.

    Args:
        plan: any plan.
        state_bytes: worker to what its state takes on each of its lanes.
        working_bytes: worker to what a call takes there beside it.
    """
    spots = {
        worker: replace(
            spot,
            state_bytes=state_bytes.get(worker, spot.state_bytes),
            working_bytes=working_bytes.get(worker, spot.working_bytes),
        )
        for worker, spot in plan.placements.items()
    }
    return replace(plan, placements=spots)
