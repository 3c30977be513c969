"""A plan in a line, and what one plan does otherwise than another, in words."""

from __future__ import annotations

from collections.abc import Iterator

from m2flow.engine.plan import Placement, Plan, StagePlan
from m2flow.plan.gantt import lane_names


def title(plan: Plan) -> str:
    """A plan's name among others: its mode, and what a mode does not say."""
    return plan.mode + (f", staleness {plan.max_staleness}" if plan.max_staleness else "")


def where(plan: Plan) -> list[str]:
    """Who stands where, a line for workers that stand alike."""
    groups: dict[str, list[str]] = {}
    for worker, spot in plan.placements.items():
        groups.setdefault(_stands(spot), []).append(worker)
    return [f"{', '.join(workers)}: {stands}" for stands, workers in groups.items()]


def differences(plan: Plan, other: Plan) -> list[str]:
    """What `other` does otherwise than `plan`: a phrase each, none where they are alike."""
    return [*_placements(plan, other), *_stages(plan, other), *_rest(plan, other)]


def _placements(plan: Plan, other: Plan) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for worker in dict.fromkeys([*plan.placements, *other.placements]):
        here, there = (_stands(one.placements.get(worker)) for one in (plan, other))
        if here != there:
            groups.setdefault((here, there), []).append(worker)
    for (here, there), workers in groups.items():
        yield f"{', '.join(workers)} on {there} instead of {here}"


def _stands(spot: Placement | None) -> str:
    if spot is None:
        return "no lane"
    gang = len(spot.replicas[0])
    layout = "" if spot.layout == "one" else f" as {spot.layout}"
    return lane_names(spot.lanes) + (f" in gangs of {gang}" if gang > 1 else "") + layout


def _stages(plan: Plan, other: Plan) -> Iterator[str]:
    for name in dict.fromkeys([*plan.stages, *other.stages]):
        here, there = plan.stages.get(name, StagePlan()), other.stages.get(name, StagePlan())
        if here.chunk != there.chunk:
            before, after = here.chunk or "all", there.chunk or "all units"
            yield f"{name} in calls of {after} instead of {before}"
        if here.max_running != there.max_running:
            least, most = here.max_running or "any", there.max_running or "any"
            yield f"at most {most} running in {name} instead of {least}"


def _rest(plan: Plan, other: Plan) -> Iterator[str]:
    if plan.order != other.order:
        first = other.order[0] if other.order else None
        yield f"a lane prefers {first}" if first else "a lane takes stages in the flow's order"
    if plan.edges != other.edges:
        yield "other limits on what may wait between stages"
    if plan.max_staleness != other.max_staleness:
        yield f"staleness {other.max_staleness} instead of {plan.max_staleness}"
    if plan.fuse_loops != other.fuse_loops:
        yield "loops go around on their lanes" if other.fuse_loops else "loops are not fused"
