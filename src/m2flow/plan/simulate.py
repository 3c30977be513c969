"""`simulate`: what a plan would take, by playing the engine under a virtual clock.

The engine is the one that runs the flow, so chunks, back-pressure, context switches, turns, weights
and staleness are as they will be; only the seconds come from a profile. Lengths are drawn from its
distributions, the same for every plan that is compared.
"""

from __future__ import annotations

import statistics
from functools import reduce
from itertools import pairwise
from operator import add

from m2flow.engine.plan import Plan
from m2flow.flow.graph import FlowGraph
from m2flow.plan.prediction import Prediction
from m2flow.plan.profile import Profile
from m2flow.plan.simulate_timing import ProfileTiming
from m2flow.plan.units import Bytes, Seconds
from m2flow.simulation.driver import SimulatedRun, Simulation
from m2flow.simulation.time_account import WORK, where_the_time_went

EVEN = 0.02
"""Relative difference between the work of steps and that between their ends, up to which they count
as whole."""


def simulate(
    graph: FlowGraph,
    plan: Plan,
    profile: Profile,
    num_items: int,
    *,
    steps: int = 3,
    seed: int = 0,
) -> Prediction:
    """Play some steps of a plan.

    Args:
        graph: the flow.
        plan: how it is carried out.
        profile: what is known of time.
        num_items: source items of a step.
        steps: how many steps the prediction is the mean of; some more where steps in flight at once
            end in bunches. Beside them, steps are played until the lanes hold what they hold in any
            later step, and until the last one is alone.
        seed: of the lengths and turns that are drawn.

    Raises:
        UserError: the profile does not know a stage, or not on such replicas.
        RunFailed: the plan does not run to its end; says who waits for whom.
    """
    warm = ahead = plan.max_staleness
    if not warm and any(lane.memory_bytes is not None for lane in plan.lanes):
        warm = 1
    timing = ProfileTiming(graph, plan, profile, seed, first_step=-warm)
    run = Simulation(graph, plan, timing).run(num_items, warm + steps + 2 * ahead)
    ends = run.step_ends
    start = ends[warm - 1] if warm else run.step_starts[0]
    steps = _whole_steps(run, start, warm, steps, ahead) if ahead else steps
    marks = [start, *(ends[step] for step in range(warm, warm + steps))]
    each = [after - before for before, after in pairwise(marks)]
    spent = where_the_time_went(run.spans, (start, marks[-1]), [lane.id for lane in plan.lanes])
    together = reduce(add, spent)
    lags = sum(run.staleness.values())
    window = (start if ahead else marks[-2], marks[-1])
    return Prediction(
        seconds=Seconds(statistics.fmean(each)),
        spread=Seconds(statistics.pstdev(each)),
        idle={lane.lane: min(1.0, lane.share(lane.terms["waiting"])) for lane in spent},
        terms={term: Seconds(taken / steps) for term, taken in together.terms.items()},
        stages={name: Seconds(taken / steps) for name, taken in together.stages.items()},
        peak_bytes={lane: Bytes(size) for lane, size in run.peak_bytes.items()},
        staleness=sum(lag * n for lag, n in run.staleness.items()) / lags if lags else 0.0,
        spans=tuple(x for x in run.spans if x.end > window[0] and x.start < window[1]),
        window=window,
        num_events=run.num_events,
    )


def _whole_steps(run: SimulatedRun, start: float, first: int, steps: int, ahead: int) -> int:
    """Return how many steps to count: `steps`, or up to `ahead` more.

    Lanes may generate for several steps before they train on any of them, so that these steps end
    in a bunch. Between two ends as much work is done as the steps in between are only where both
    ends are at the same place in a bunch.

    Args:
        run: what was played.
        start: second from which on steps are counted.
        first: the first of them.
        steps: how many there are at least.
        ahead: steps that others may be in flight before.
    """
    work = [(span.start, span.end) for span in run.spans if span.kind in WORK]
    of_step = sum(end - begin for begin, end in work) / len(run.step_ends)

    def excess(count: int) -> float:
        """Work between the ends that is not of so many steps, as a share of theirs."""
        last = run.step_ends[first + count - 1]
        done = sum(max(0.0, min(end, last) - max(begin, start)) for begin, end in work)
        return abs(done / (count * of_step) - 1) if of_step else 0.0

    counts = range(steps, steps + ahead + 1)
    whole = (count for count in counts if excess(count) <= EVEN)
    return next(whole, None) or min(counts, key=excess)
