"""Lanes of their own for workers that must have a process of their own.

A worker that sets `isolation` gets, beside each lane it would stand on, one that is reserved for
it: on the same machine, with the same cores and accelerator. An eager run has one process, so
nobody can be isolated there, and its plan stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.flow.flow import Flow


def isolated_workers(flow: Flow) -> frozenset[str]:
    """Names of a flow's workers that ask for a process of their own."""
    return frozenset(name for name, one in flow.workers.items() if one.isolation is not None)


def isolate(plan: Plan, workers: Collection[str]) -> Plan:
    """The plan with reserved lanes for these workers, numbered after the others.

    A worker that stands on lanes reserved for it already stays there. Lanes of the plan that are
    reserved for it and have the same cores and accelerator are taken before new ones are added,
    each for one lane: lanes without cores may be all alike. Each reserved lane has the
    memory limit of the lane that it stands beside.

    Args:
        plan: what a builder, or a person, has made.
        workers: who must have a process of their own; those without a placement do not count.
    """
    if plan.mode == "eager":
        return plan
    by_id = {lane.id: lane for lane in plan.lanes}
    added: list[LaneSpec] = []
    placements = dict(plan.placements)
    for worker in sorted(set(workers) & placements.keys()):
        standing = placements[worker].lanes
        moved = {lane: lane for lane in standing if by_id[lane].reserved_for == worker}
        for lane in standing:
            if lane in moved:
                continue
            wanted, taken = replace(by_id[lane], reserved_for=worker), set(moved.values())
            alike = (x.id for x in plan.lanes if replace(wanted, id=x.id) == x)
            there = next((x for x in alike if x not in taken), None)
            if there is None:
                there = max(by_id) + 1 + len(added)
                added.append(replace(wanted, id=there))
            moved[lane] = there
        replicas = tuple(
            tuple(moved[lane] for lane in gang) for gang in placements[worker].replicas
        )
        placements[worker] = replace(placements[worker], replicas=replicas)
    return replace(plan, lanes=(*plan.lanes, *added), placements=placements)
