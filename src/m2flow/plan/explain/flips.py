"""What change of which input would make another plan the best one, found by simulating again.

The seconds of each stage, of switching, of publishing and of links are scaled up and down in turn,
and the chosen plan and its rivals are simulated under each scaled profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from m2flow.errors import RunFailed
from m2flow.flow.graph import FlowGraph
from m2flow.plan.explain.differences import differences
from m2flow.plan.prediction import AS_GOOD, Candidate, Decision
from m2flow.plan.profile import Profile, WorkerCost
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


def flips(decision: Decision, graph: FlowGraph) -> list[Flip]:
    """What would flip a choice, smallest changes first.

    Args:
        decision: whose choice. Nothing flips it if a rival is faster already: a person made it.
        graph: its flow.
    """
    chosen = decision.chosen
    allowed = chosen.plan.max_staleness
    rivals = [one for one in decision.others if one.plan.max_staleness <= allowed][:RIVALS]
    if any(one.prediction.seconds * (1 + AS_GOOD) < chosen.prediction.seconds for one in rivals):
        return []
    found: list[Flip] = []
    for what in (*(node.name for node in graph.nodes), *OVERHEAD) if rivals else ():
        if any(_share(one, what) >= NOTICED for one in (chosen, *rivals)):
            found += _of_input(what, decision, graph, rivals)
    return sorted(found, key=lambda flip: abs(math.log(flip.factor)))


def _share(one: Candidate, what: str) -> float:
    """The share of the lanes' time that an input takes."""
    prediction = one.prediction
    spent = prediction.stages.get(what, prediction.terms.get(what, 0.0))
    return float(spent) / max(1e-12, sum(prediction.terms.values()))


def _of_input(
    what: str, decision: Decision, graph: FlowGraph, rivals: Sequence[Candidate]
) -> Iterator[Flip]:
    """The smallest flip of an input upwards, and the smallest downwards, where there is one."""
    chosen = decision.chosen

    def overtaken(factor: float) -> Flip | None:
        profile = rescaled(decision.profile, what, factor)

        def seconds(one: Candidate) -> float:
            try:
                found = simulate(graph, one.plan, profile, decision.num_items, steps=STEPS)
            except RunFailed:
                return math.inf
            return float(found.seconds)

        ours, theirs = seconds(chosen), [seconds(rival) for rival in rivals]
        best = min(theirs)
        if best * (1 + AS_GOOD) >= ours:
            return None
        other = rivals[theirs.index(best)].plan
        changes = tuple(differences(chosen.plan, other))
        return Flip(what, factor, other.mode, changes, ours, best)

    for ladder in (FACTORS, tuple(1 / factor for factor in FACTORS)):
        largest = overtaken(ladder[-1])
        if largest is not None:
            yield next(filter(None, map(overtaken, ladder[:-1])), largest)


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
                place: replace(
                    link, latency=scaled(link.latency), rate=BytesPerSecond(link.rate / factor)
                )
                for place, link in profile.links.items()
            }
            return replace(profile, links=links)
        case "switching":
            workers = {name: tuple(map(switched, own)) for name, own in profile.workers.items()}
            return replace(profile, workers=workers)
    return replace(profile, stages={**profile.stages, what: profile.stage(what).times(factor)})
