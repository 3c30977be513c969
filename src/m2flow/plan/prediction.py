"""What a plan is expected to do: the answer of a simulation, and of the choice among plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.plan.profile import Profile
from m2flow.plan.search import Found
from m2flow.plan.units import Bytes, Seconds


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
        peak_bytes: for each lane, where sizes are known.
        staleness: mean version lag of the items.
        spans: of the last step, from second 0 on, for a picture.
    """

    seconds: Seconds
    spread: Seconds
    idle: Mapping[int, float]
    terms: Mapping[str, Seconds]
    stages: Mapping[str, Seconds]
    peak_bytes: Mapping[int, Bytes] = field(default_factory=dict)
    staleness: float = 0.0
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A plan that was considered to the end.

    Attributes:
        plan: with the predicted seconds in it.
        prediction: what the simulation gave.
        found: the tree it was drawn from; None for the plan of a fixed mode.
        measured: seconds of a step in a trial on real lanes; None if there was none.
    """

    plan: Plan
    prediction: Prediction
    found: Found | None = None
    measured: Seconds | None = None


@dataclass(frozen=True)
class Decision:
    """The plan that was chosen, and what it was chosen from.

    Attributes:
        chosen: the best one.
        others: the rest, fastest first.
        profile: what all of them were judged by.
        num_items: source items of a step.
        seconds_to_decide: how long search and simulation took.
        frontier: the best candidate for each staleness that is worth it, from 0 on.
        ruled_out: plans that cannot run, by name, and why.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    profile: Profile
    num_items: int
    seconds_to_decide: float = 0.0
    frontier: tuple[Candidate, ...] = ()
    ruled_out: Mapping[str, str] = field(default_factory=dict)
