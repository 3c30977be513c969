"""What change of which input would make another plan the best one.

Each input (the seconds of a stage, switching, publishing, links) is made dearer and cheaper until
another of the plans that were considered is faster than the chosen one; bisection finds the
smallest such factor. It is estimated first; where simulating is quick, both plans are simulated and
the factor is moved to where the simulation says so. Memory and the number of lanes are put to the
search again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from m2flow.flow.graph import FlowGraph
from m2flow.plan.explaining.differences import differences
from m2flow.plan.explaining.other_lanes import Flip, searched
from m2flow.plan.explaining.rescaled import WHOLE, Estimates, Judge, priced, rescaled
from m2flow.plan.prediction import Candidate, Decision
from m2flow.plan.search import Limits

MOST = 8.0
"""No input is scaled by more than this, up or down."""

STRIDE = 1.5
"""From one factor to the next, while a flip is looked for."""

FINE, COARSE = 8, 5
"""Bisections of an estimate, and of a simulation."""

RIVALS = 6
"""So many of the other plans may overtake."""

CLEAR = 0.01
"""What is faster by less counts as equally fast, as in the choice itself."""

Seconds = Callable[[Candidate, float], float]
"""Of a step of a candidate, at a factor."""


@dataclass(frozen=True)
class _Overtaken:
    """A factor at which a rival is ahead: the seconds of both."""

    factor: float
    rival: Candidate
    seconds: float
    instead: float


def flips(
    decision: Decision,
    graph: FlowGraph,
    limits: Limits | None = None,
    judge: Judge | None = None,
    budget: float = 10.0,
) -> list[Flip]:
    """What would flip a choice, smallest changes first.

    Args:
        decision: whose choice.
        graph: its flow.
        limits: as in its search.
        judge: simulates a candidate under another profile; None: estimates only.
        budget: seconds that simulating may take.
    """
    chosen, rivals = decision.chosen, _rivals(decision)
    found: list[Flip] = []
    if rivals and not _beaten(chosen, rivals):
        estimates = Estimates(graph, decision.profile, decision.num_items, limits)
        allowance = _Allowance(judge, decision, budget)
        for what in (*(node.name for node in graph.nodes), *WHOLE):
            if priced(decision.profile, what):
                found += _of(what, chosen, rivals, estimates, allowance)
        found += _less_memory(chosen, rivals)
    found += searched(decision, graph, limits)
    return sorted(found, key=lambda flip: abs(math.log(flip.factor)))


def _rivals(decision: Decision) -> list[Candidate]:
    """Plans within the chosen one's staleness: the fastest of each mode, then the next fastest."""
    allowed = decision.chosen.plan.max_staleness
    others = [one for one in decision.others if one.plan.max_staleness <= allowed]
    first = {one.plan.mode: one for one in reversed(others)}
    leading = [one for one in others if first[one.plan.mode] is one]
    rest = [one for one in others if first[one.plan.mode] is not one]
    return [*leading, *rest][:RIVALS]


def _beaten(chosen: Candidate, rivals: Sequence[Candidate]) -> bool:
    """Whether a rival is faster as things are: the choice was somebody's wish."""
    least = min(one.measured or one.prediction.seconds for one in rivals)
    return least * (1 + CLEAR) < (chosen.measured or chosen.prediction.seconds)


class _Allowance:
    """Simulations, as long as there is time for them and one is quick enough to ask for many."""

    def __init__(self, judge: Judge | None, decision: Decision, seconds: float) -> None:
        self.judge, self.profile, self.left = judge, decision.profile, seconds
        if judge is None:
            return
        started = time.perf_counter()
        judge(decision.chosen, decision.profile)
        each = time.perf_counter() - started
        if each * 4 * COARSE * (len(decision.profile.stages) + len(WHOLE)) > seconds:
            self.judge = None

    def of(self, what: str) -> Seconds | None:
        """The judge of one input; None where it takes too long."""
        judge = self.judge
        if judge is None or self.left <= 0:
            return None

        def seconds(candidate: Candidate, factor: float) -> float:
            started = time.perf_counter()
            found = judge(candidate, rescaled(self.profile, what, factor))
            self.left -= time.perf_counter() - started
            return found

        return seconds


def _of(
    what: str,
    chosen: Candidate,
    rivals: Sequence[Candidate],
    estimates: Estimates,
    allowance: _Allowance,
) -> Iterable[Flip]:
    """The flips of one input: upwards and downwards, where there are any."""

    def estimated(one: Candidate, factor: float) -> float:
        return estimates.seconds(one, what, factor)

    for limit in (MOST, 1 / MOST):
        stride = STRIDE if limit > 1 else 1 / STRIDE
        first = _smallest(estimated, chosen, rivals, limit, stride, FINE)
        at, how = first, "estimated"
        simulated = allowance.of(what)
        if simulated is not None:
            start = first.factor if first else limit
            near = [] if first is None else [first.rival]
            near += [rival for rival in rivals if rival not in near]
            at = _smallest(simulated, chosen, near[:2], limit, start, COARSE)
            how = "simulated"
        if at is not None:
            changed = tuple(differences(chosen.plan, at.rival.plan))
            mode = at.rival.plan.mode
            yield Flip(what, at.factor, mode, changed, at.seconds, at.instead, how)


def _smallest(
    seconds: Seconds,
    chosen: Candidate,
    rivals: Sequence[Candidate],
    limit: float,
    start: float,
    bisections: int,
) -> _Overtaken | None:
    """The factor nearest to 1, on the limit's side, at which a rival is clearly ahead."""

    def ahead(factor: float) -> _Overtaken | None:
        ours = seconds(chosen, factor)
        theirs = [(seconds(rival, factor), n) for n, rival in enumerate(rivals)]
        best, number = min(theirs)
        if math.isfinite(best) and best < ours / (1 + CLEAR):
            return _Overtaken(factor, rivals[number], ours, best)
        return None

    stride = STRIDE if limit > 1 else 1 / STRIDE
    low, high = 1.0, start
    while (found := ahead(high)) is None:
        if high == limit:
            return None
        low, high = high, high * stride
        if (high > limit) == (limit > 1):
            high = limit
    for _ in range(bisections):
        middle = math.sqrt(low * high)
        nearer = ahead(middle)
        low, high = (low, middle) if nearer else (middle, high)
        found = nearer or found
    return found


def _less_memory(chosen: Candidate, rivals: Sequence[Candidate]) -> Iterable[Flip]:
    """The share of its memory that a lane must keep for the chosen plan, if a rival needs less."""

    def needs(one: Candidate) -> float:
        limits = {lane.id: lane.memory_bytes for lane in one.plan.lanes}
        peaks = one.prediction.peak_bytes
        return max((peak / size for lane, peak in peaks.items() if (size := limits.get(lane))),
                   default=0.0)  # fmt: skip

    share = needs(chosen)
    leaner = [one for one in rivals if needs(one) < share]
    if 1 / MOST <= share <= 1 and leaner:
        other = leaner[0]
        changed = tuple(differences(chosen.plan, other.plan))
        seconds = float(other.prediction.seconds)
        yield Flip("memory", share, other.plan.mode, changed, None, seconds, "simulated")
