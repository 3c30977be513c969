"""What bounds a predicted step: the work of the lanes that have the least time left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from m2flow.engine.spans import Span
from m2flow.plan.prediction import Candidate
from m2flow.plan.sizes import brief
from m2flow.simulation.time_account import by_lane, where_the_time_went

ALIKE = 0.05
"""Lanes whose idle shares differ by less than this are equally busy."""


@dataclass(frozen=True)
class Bottleneck:
    """What takes most of the time of the busiest lanes.

    Attributes:
        what: a stage, or "switching", "publishing", "links", "waiting".
        lanes: the busiest lanes.
        seconds: that it takes on each of them in a step, in the mean.
        share: of the step.
        why: of its longest items, if these keep few lanes at work; else empty.
    """

    what: str
    lanes: tuple[int, ...]
    seconds: float
    share: float
    why: str


def bottleneck(candidate: Candidate) -> Bottleneck:
    """What bounds the step of a candidate."""
    spans, lanes = candidate.prediction.every_span(), [x.id for x in candidate.plan.lanes]
    accounts = where_the_time_went(spans, candidate.prediction.window, lanes)
    idle = {one.lane: one.share(one.terms["waiting"]) for one in accounts}
    least = min(idle.values())
    busiest = [one for one in accounts if idle[one.lane] <= least + ALIKE]
    together = reduce(add, busiest)
    spent = {**together.stages, **together.terms}
    del spent["compute"]  # the stages have it
    what = max(spent, key=lambda name: spent[name])
    share = accounts[0].share(spent[what] / len(busiest))
    seconds = share * float(candidate.prediction.seconds)
    own = tuple(one.lane for one in busiest)
    why = ""
    if (tail := _tail(spans, what)) is not None:
        why = f"the last {brief(tail)} of it run on at most half of its lanes: the longest items"
    return Bottleneck(what, own, seconds, share, why)


def _tail(spans: Sequence[Span], stage: str) -> float | None:
    """Seconds in which at most half of a stage's lanes still run it, if they are many."""
    calls = [span for span in spans if (span.kind, span.name) == ("call", stage)]
    ends = sorted(max(span.end for span in own) for own in by_lane(calls).values())
    if len(ends) < 2:
        return None
    tail = ends[-1] - ends[math.ceil(len(ends) / 2) - 1]
    return tail if tail > 0.1 * (ends[-1] - min(span.start for span in calls)) else None
