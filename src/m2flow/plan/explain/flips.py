"""What change of which input would make another plan the best one, found by simulating again.

The seconds of each stage, of switching, of publishing and of links are scaled up and down in turn,
and the chosen plan and its rivals are simulated under each scaled profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from m2flow.engine.plan import Plan
from m2flow.errors import RunFailed
from m2flow.flow.graph import FlowGraph
from m2flow.plan.choose.folding import folded_profile
from m2flow.plan.explain.differences import differences
from m2flow.plan.prediction import AS_GOOD, Candidate, Decision
from m2flow.plan.profile import LinkCost, Profile, WorkerCost
from m2flow.plan.simulate import simulate
from m2flow.plan.units import BytesPerSecond, Seconds

FACTORS = (1.25, 1.5, 2.0, 4.0)
"""An input is multiplied and divided by these."""

RIVALS = 3
"""Number of other plans that may overtake."""

NOTICED = 0.01
"""An input that takes less than this share of the lanes' time in every plan flips nothing."""

STEPS = 2
"""Steps of a simulation."""

MOST_EVENTS = 400_000
"""Events of all simulations: some ten seconds."""

OVERHEAD = ("switching", "publishing", "links")
"""Inputs beside the stages."""


@dataclass(frozen=True)
class Flip:
    """A change of one input that makes another plan the best.

    Attributes:
        input: a stage, or one of OVERHEAD.
        factor: what it is multiplied by.
        mode: of the plan that is best then.
        changes: what that plan does otherwise, a phrase each.
        chosen_seconds: of a step of the chosen plan then.
        other_seconds: of a step of the other one.
    """

    input: str
    factor: float
    mode: str
    changes: tuple[str, ...]
    chosen_seconds: float
    other_seconds: float


@dataclass(frozen=True)
class Flips:
    """What would flip a choice.

    Attributes:
        found: smallest changes first.
        not_tried: inputs for which no events were left.
    """

    found: tuple[Flip, ...] = ()
    not_tried: tuple[str, ...] = ()


def flips(decision: Decision, graph: FlowGraph, most_events: int = MOST_EVENTS) -> Flips:
    """What would flip a choice; inputs that take most of the lanes' time are tried first.

    Args:
        decision: whose choice. Nothing flips it if a rival is faster already: a person made it.
        graph: its flow.
        most_events: no further simulation begins after so many simulated events.
    """
    chosen = decision.chosen
    allowed = chosen.plan.max_staleness
    rivals = [one for one in decision.others if one.plan.max_staleness <= allowed][:RIVALS]
    if any(one.prediction.seconds * (1 + AS_GOOD) < chosen.prediction.seconds for one in rivals):
        return Flips()
    names = (*(node.name for node in graph.nodes), *OVERHEAD) if rivals else ()
    shares = {what: max(_share(one, what) for one in (chosen, *rivals)) for what in names}
    contest = _Contest(decision, graph, rivals, most_events)
    found, not_tried = list[Flip](), list[str]()
    for what in sorted((x for x in names if shares[x] >= NOTICED), key=lambda x: -shares[x]):
        try:
            found += list(contest.of_input(what))
        except _Spent:
            not_tried.append(what)
    found.sort(key=lambda flip: abs(math.log(flip.factor)))
    return Flips(tuple(found), tuple(not_tried))


def _share(one: Candidate, what: str) -> float:
    """The share of the lanes' time that an input takes."""
    prediction = one.prediction
    spent = prediction.stages.get(what, prediction.terms.get(what, 0.0))
    return float(spent) / max(1e-12, sum(prediction.terms.values()))


class _Spent(Exception):
    """No events are left."""


class _Contest:
    """The chosen plan and its rivals, on a part of the lanes where all were judged on one."""

    def __init__(
        self, decision: Decision, graph: FlowGraph, rivals: Sequence[Candidate], events: int
    ) -> None:
        self._graph, self._rivals, self._chosen = graph, rivals, decision.chosen
        self._events, every = events, (decision.chosen, *rivals)
        fold = decision.fold if all(one.part is not None for one in every) else 1
        plans = ((fold > 1 and one.part) or one.plan for one in every)
        self._plans = [replace(plan, deadline_seconds=math.inf) for plan in plans]
        self._profile = folded_profile(decision.profile, graph, fold)
        self._num_items = decision.num_items // fold

    def of_input(self, what: str) -> Iterator[Flip]:
        """The smallest flip of an input upwards, and the smallest downwards, where there is one."""
        for ladder in (FACTORS, tuple(1 / factor for factor in FACTORS)):
            largest = self._overtaken(what, ladder[-1])
            if largest is not None:
                smaller = (self._overtaken(what, factor) for factor in ladder[:-1])
                yield next(filter(None, smaller), largest)

    def _overtaken(self, what: str, factor: float) -> Flip | None:
        profile = rescaled(self._profile, what, factor)
        ours, *theirs = (self._seconds(plan, profile) for plan in self._plans)
        best = min(theirs)
        if best * (1 + AS_GOOD) >= ours:
            return None
        other = self._rivals[theirs.index(best)].plan
        changes = tuple(differences(self._chosen.plan, other))
        return Flip(what, factor, other.mode, changes, ours, best)

    def _seconds(self, plan: Plan, profile: Profile) -> float:
        if self._events <= 0:
            raise _Spent
        try:
            found = simulate(self._graph, plan, profile, self._num_items, steps=STEPS)
        except RunFailed:
            return math.inf
        self._events -= found.num_events
        return float(found.seconds)


def rescaled(profile: Profile, what: str, factor: float) -> Profile:
    """The profile with the seconds of a stage, or of one of `OVERHEAD`, times a factor."""

    def scaled(seconds: Seconds) -> Seconds:
        return Seconds(seconds * factor)

    def switched(cost: WorkerCost) -> WorkerCost:
        return replace(cost, onload=scaled(cost.onload), offload=scaled(cost.offload))

    match what:
        case "publishing":
            prices = tuple(replace(one, seconds=scaled(one.seconds)) for one in profile.publish)
            return replace(profile, publish=prices)
        case "links":
            links = {
                place: LinkCost(scaled(link.latency), BytesPerSecond(link.rate / factor))
                for place, link in profile.links.items()
            }
            return replace(profile, links=links)
        case "switching":
            workers = {name: tuple(map(switched, own)) for name, own in profile.workers.items()}
            return replace(profile, workers=workers)
    return replace(profile, stages={**profile.stages, what: profile.stage(what).times(factor)})
