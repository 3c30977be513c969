"""A profile in which one input costs more or less, and what that makes of a plan's seconds.

Two ways to judge: the plan is simulated again, which is exact; or, where that takes too long, its
seconds are *estimated*. A plan with a tree of the search then costs what the tree does, in
proportion; any other its own chain of work, stretched, and never less than its fullest lane works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from m2flow.engine.plan import LaneSpec
from m2flow.engine.spans import Span
from m2flow.errors import M2FlowError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.explaining.path import TERMS, chain, path_seconds
from m2flow.plan.explaining.rows import merged
from m2flow.plan.prediction import Candidate
from m2flow.plan.profile import Profile, WorkerCost
from m2flow.plan.search import Limits, Problem, evaluate, problem
from m2flow.plan.units import BytesPerSecond, Seconds

WHOLE = ("switching", "publishing", "links")
"""Inputs beside the stages."""

Judge = Callable[[Candidate, Profile], float]
"""Seconds of a step of a candidate under a profile; infinite if it cannot run."""


def rescaled(profile: Profile, what: str, factor: float) -> Profile:
    """The profile with the seconds of a stage, or of one of WHOLE, times a factor."""
    if what == "publishing":
        prices = tuple(
            replace(price, seconds=Seconds(price.seconds * factor)) for price in profile.publish
        )
        return replace(profile, publish=prices)
    if what == "links":
        links = {
            place: replace(
                link,
                latency=Seconds(link.latency * factor),
                rate=BytesPerSecond(link.rate / factor),
            )
            for place, link in profile.links.items()
        }
        return replace(profile, links=links)
    if what == "switching":
        workers = {
            name: tuple(_switched(layout, factor) for layout in layouts)
            for name, layouts in profile.workers.items()
        }
        return replace(profile, workers=workers)
    return replace(profile, stages={**profile.stages, what: profile.stage(what).times(factor)})


def _switched(layout: WorkerCost, factor: float) -> WorkerCost:
    return replace(
        layout,
        onload=Seconds(layout.onload * factor),
        offload=Seconds(layout.offload * factor),
    )


def priced(profile: Profile, what: str) -> bool:
    """Whether an input has a price at all; what is free stays free times any factor."""
    match what:
        case "publishing":
            return any(price.seconds > 0 for price in profile.publish)
        case "links":
            return bool(profile.links)
        case "switching":
            layouts = [layout for own in profile.workers.values() for layout in own]
            return any(layout.switch > 0 for layout in layouts)
    return True


@dataclass
class Estimates:
    """Estimated seconds of candidates under rescaled profiles.

    Attributes:
        graph, profile: what the candidates were judged by.
        num_items: source items of a step.
        limits: as in the search.
    """

    graph: FlowGraph
    profile: Profile
    num_items: int
    limits: Limits | None = None
    _paths: dict[int, Mapping[str, float]] = field(default_factory=dict)
    _trees: dict[int, float] = field(default_factory=dict)

    def seconds(self, candidate: Candidate, what: str, factor: float) -> float:
        """Of a step in which an input costs so many times as much."""
        base = float(candidate.measured or candidate.prediction.seconds)
        if candidate.found is not None:
            known = self._trees.get(id(candidate))
            if known is None:
                known = self._trees[id(candidate)] = self._by_tree(candidate, self.profile)
            return base * self._by_tree(candidate, rescaled(self.profile, what, factor)) / known
        if id(candidate) not in self._paths:
            self._paths[id(candidate)] = path_seconds(chain(candidate.prediction.spans, self.graph))
        stretched = base + (factor - 1) * self._paths[id(candidate)].get(what, 0.0)
        return max(stretched, _fullest(candidate, what, factor))

    def _by_tree(self, candidate: Candidate, profile: Profile) -> float:
        assert candidate.found is not None
        stated = self.problem(candidate.plan.lanes, profile)
        priced = evaluate(stated, candidate.found.tree)
        return priced.cost.first + priced.cost.publishing

    def problem(self, lanes: tuple[LaneSpec, ...], profile: Profile) -> Problem:
        """The search that a candidate's tree belongs to."""
        shared = [lane for lane in lanes if lane.reserved_for is None]
        return problem(self.graph, profile, shared, self.num_items, self.limits)


def _fullest(candidate: Candidate, what: str, factor: float) -> float:
    """Seconds of work of the lane that has most of it."""
    by_lane: dict[int, list[Span]] = {}
    for span in candidate.prediction.spans:
        by_lane.setdefault(span.lane, []).append(span)
    most = 0.0
    for spans in by_lane.values():
        busy = 0.0
        for (kind, name), start, end in merged(spans):
            term = TERMS.get(kind, name)
            busy += (end - start) * (factor if term == what else term != "waiting")
        most = max(most, busy)
    return most


def simulated(graph: FlowGraph, num_items: int, steps: int = 2) -> Judge:
    """A judge that plays each plan through the engine, on the same draws of lengths."""
    from m2flow.plan.simulate import simulate

    def judge(candidate: Candidate, profile: Profile) -> float:
        try:
            seconds = simulate(graph, candidate.plan, profile, num_items, steps=steps).seconds
        except M2FlowError:
            return math.inf
        return float(seconds)

    return judge
