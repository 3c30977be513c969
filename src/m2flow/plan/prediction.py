"""What a plan is expected to do: the answer of a simulation, and of the choice among plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from m2flow.engine.plan import Plan, StagePlan
from m2flow.engine.spans import Span
from m2flow.plan.profile import Profile
from m2flow.plan.units import Bytes, Seconds
from m2flow.simulation.time_account import Window, by_lane

AS_GOOD = 0.01
"""Relative difference of predicted seconds up to which two plans count as equally fast."""

MINOR = 0.01
"""A stage that takes a smaller share of the lanes' work makes no difference between plans."""


@dataclass(frozen=True)
class Prediction:
    """Simulated steps of a plan.

    Attributes:
        seconds: of a step, the mean once the pipeline of steps is full.
        spread: standard deviation between steps, as lengths differ.
        idle: for each lane the share of its time in which it does nothing.
        terms: seconds of lanes a step, added over all lanes: "compute", "switching", "publishing",
            "links", "waiting" (idle).
        stages: seconds of lanes that each stage takes a step.
        peak_bytes: for each lane with a limit of memory.
        staleness: mean version lag of the items.
        spans: of the last step, for a picture; with staleness of all steps, as they overlap.
        alike: lanes that do what another lane does, whose spans stand for theirs, and that lane.
        window: seconds between which the steps of `spans` ran.
        num_events: events that the engine has handled for it.
    """

    seconds: Seconds
    spread: Seconds
    idle: Mapping[int, float]
    terms: Mapping[str, Seconds]
    stages: Mapping[str, Seconds]
    peak_bytes: Mapping[int, Bytes] = field(default_factory=dict)
    staleness: float = 0.0
    spans: tuple[Span, ...] = ()
    alike: Mapping[int, int] = field(default_factory=dict)
    window: Window = (0.0, 0.0)
    num_events: int = 0

    def every_span(self) -> list[Span]:
        """The spans of all lanes."""
        of_lane = by_lane(self.spans)
        others = (
            replace(span, lane=lane)
            for lane, like in self.alike.items()
            for span in of_lane.get(like, ())
        )
        return [*self.spans, *others]


@dataclass(frozen=True)
class Candidate:
    """A plan that was simulated.

    Attributes:
        plan: with the predicted seconds in it.
        prediction: what the simulation gave.
        part: where equal lanes were folded, the plan on a part of them that was simulated.
    """

    plan: Plan
    prediction: Prediction
    part: Plan | None = None


@dataclass(frozen=True)
class Decision:
    """The plan that was chosen, and what it was chosen from.

    Attributes:
        chosen: the best one.
        others: the rest, fastest first.
        profile: what all of them were judged by.
        num_items: source items of a step.
        seconds_to_decide: how long the choice took.
        frontier: the best candidate for each staleness that is worth it, from 0 on.
        ruled_out: plans that break a limit, or whose price nobody knows, each with the reason.
        num_simulated: simulations that the choice took.
        fold: how many lanes each lane of a candidate's `part` stands for.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    profile: Profile
    num_items: int
    seconds_to_decide: float = 0.0
    frontier: tuple[Candidate, ...] = ()
    ruled_out: Mapping[str, str] = field(default_factory=dict)
    num_simulated: int = 0
    fold: int = 1

    def shortlist(self, error: float, at_most: int = 4) -> tuple[Candidate, ...]:
        """The plans that a prediction cannot tell from the best one, the chosen one first.

        Args:
            error: relative error of predictions.
            at_most: so many plans.
        """
        most = min(one.prediction.seconds for one in (self.chosen, *self.others)) * (1 + error)
        kept = [self.chosen]
        stages = self.chosen.prediction.stages
        least = MINOR * sum(stages.values())
        minor = {name for name, seconds in stages.items() if seconds < least}
        for other in self.others:
            near = other.prediction.seconds <= most and len(kept) < at_most
            if near and all(differ(other.plan, one.plan, minor) for one in kept):
                kept.append(other)
        return tuple(kept)


def differ(one: Plan, other: Plan, minor: Collection[str] = ()) -> bool:
    """Whether it is worth trying both plans.

    It is not if equal lanes have changed places, if only the sizes of calls differ, by less than a
    factor of 2, or if only the order differs of stages that are alone on their lanes.

    Args:
        one, other: plans of one flow on the same lanes.
        minor: stages that take next to nothing; how they are run makes no difference.
    """
    if (one.max_staleness, one.fuse_loops) != (other.max_staleness, other.fuse_loops):
        return True
    if _standing(one, minor) != _standing(other, minor) or one.edges != other.edges:
        return True
    if _preferred(one, minor) != _preferred(other, minor):
        return True
    for name, stage in one.stages.items():
        if name in minor:
            continue
        there = other.stages.get(name, StagePlan())
        for mine, its in ((stage.chunk, there.chunk), (stage.max_running, there.max_running)):
            if (mine is None) != (its is None) or not 0.5 < (mine or 1) / (its or 1) < 2:
                return True
    return False


def _preferred(plan: Plan, minor: Collection[str]) -> list[str]:
    """The plan's order of the stages that share a lane with another one."""
    stages = {
        name: plan.placements[name.partition(".")[0]].lanes
        for name in plan.order
        if name not in minor
    }
    num_stages = Counter(chain.from_iterable(stages.values()))
    return [name for name, lanes in stages.items() if any(num_stages[lane] > 1 for lane in lanes)]


def _standing(plan: Plan, minor: Collection[str]) -> list[tuple[object, ...]]:
    """Who stands with whom: placements, with equal lanes numbered as they first occur."""
    alike = {
        lane.id: (lane.kind, lane.node, lane.memory_bytes, len(lane.cores), lane.reserved_for)
        for lane in plan.lanes
    }
    numbers: dict[int, int] = {}
    found: list[tuple[object, ...]] = []
    for worker, spot in sorted(plan.placements.items()):
        stages = [name for name in plan.stages if name.partition(".")[0] == worker]
        if stages and all(name in minor for name in stages):
            continue
        lanes = [
            [(numbers.setdefault(lane, len(numbers)), alike[lane]) for lane in gang]
            for gang in spot.replicas
        ]
        found.append((worker, spot.layout, lanes))
    return found
