"""What one plan does otherwise than another, in words, and a plan in a line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from m2flow.engine.plan import Placement, Plan, StagePlan
from m2flow.plan.explaining.rows import lane_names

TAIL = ("switch_at", "keep")
"""Fields of a stage that say when its tail begins."""

SEEN = ("mode", "lanes", "placements", "stages", "order", "deadline_seconds", "predicted_seconds")
"""Fields of a plan that are told in words of their own, or that say nothing of how it runs."""


def title(plan: Plan) -> str:
    """A plan's name among others: its mode, and what a mode does not say."""
    tails = [
        _tail(name, stage) for name, stage in plan.stages.items() if stage.switch_at is not None
    ]
    mode = plan.mode.removesuffix(", switching") if tails else plan.mode
    ahead = [f"staleness {plan.max_staleness}"] if plan.max_staleness else []
    return ", ".join([mode, *ahead, *tails])


def where(plan: Plan) -> list[str]:
    """Who stands where, workers on the same lanes in the same gangs together."""
    groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for worker, spot in plan.placements.items():
        groups.setdefault(spot.replicas, []).append(worker)
    return [
        f"{', '.join(workers)}: {_stands(plan.placements[workers[0]])}"
        for workers in groups.values()
    ]


def differences(plan: Plan, other: Plan) -> list[str]:
    """What `other` does otherwise than `plan`: one phrase each, none where they are alike."""
    return [
        *_placements(plan, other),
        *_stages(plan, other),
        *_order(plan, other),
        *_fields(plan, other),
    ]


def _placements(plan: Plan, other: Plan) -> Iterator[str]:
    groups: dict[tuple[Placement | None, Placement | None], list[str]] = {}
    for worker in dict.fromkeys([*plan.placements, *other.placements]):
        here, there = plan.placements.get(worker), other.placements.get(worker)
        if here is None or there is None or here.replicas != there.replicas:
            bare = [spot and Placement(spot.replicas) for spot in (here, there)]
            groups.setdefault((bare[0], bare[1]), []).append(worker)
    for (here, there), workers in groups.items():
        names = ", ".join(workers)
        if here is not None and there is not None and set(here.lanes) == set(there.lanes):
            yield f"{names} {_gangs(there)} instead of {_gangs(here)}"
        else:
            yield f"{names} on {_stands(there)} instead of {_stands(here)}"


def _stands(spot: Placement | None) -> str:
    if spot is None:
        return "no lane"
    gang = len(spot.replicas[0])
    return lane_names(spot.lanes) + (f" in gangs of {gang}" if gang > 1 else "")


def _gangs(spot: Placement) -> str:
    """How many lanes of a worker take part in each call."""
    gang = len(spot.replicas[0])
    return f"in gangs of {gang}" if gang > 1 else "with a copy on each lane"


def _stages(plan: Plan, other: Plan) -> Iterator[str]:
    for name in dict.fromkeys([*plan.stages, *other.stages]):
        here, there = plan.stages.get(name, StagePlan()), other.stages.get(name, StagePlan())
        for field in dataclasses.fields(StagePlan):
            before, after = getattr(here, field.name), getattr(there, field.name)
            if before == after or field.name in TAIL:
                continue
            if field.name == "chunk":
                yield f"{name} in calls of {after or 'all units'} instead of {before or 'all'}"
            elif field.name == "max_running":
                yield f"at most {after or 'any'} running in {name} instead of {before or 'any'}"
            else:
                yield f"{name}: {field.name} {after} instead of {before}"
        if any(getattr(here, field) != getattr(there, field) for field in TAIL):
            yield f"{_tail(name, there)} instead of {_tail(name, here).removeprefix(f'{name} ')}"


def _tail(name: str, stage: StagePlan) -> str:
    """When a stage's lanes pass to others, and how many of its replicas go on."""
    if stage.switch_at is None:
        return f"{name} on all its lanes to the end"
    kept = "half of its replicas" if stage.keep is None else f"{stage.keep} of its replicas"
    return f"{name} on {kept} from {stage.switch_at:.0%} done"


def _order(plan: Plan, other: Plan) -> Iterator[str]:
    if plan.order != other.order:
        first = other.order[0] if other.order else None
        yield f"a lane prefers {first}" if first else "a lane takes stages in the flow's order"


def _fields(plan: Plan, other: Plan) -> Iterator[str]:
    for field in dataclasses.fields(Plan):
        before, after = getattr(plan, field.name), getattr(other, field.name)
        if field.name not in SEEN and before != after:
            yield f"{field.name.replace('max_', '')} {after} instead of {before}"
