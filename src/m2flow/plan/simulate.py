"""`simulate`: what a plan would take, by playing the engine under a virtual clock.

The engine is the one that runs the flow, so chunks, back-pressure, context switches, turns, weights
and staleness are as they will be; only the seconds come from a profile. Lengths are drawn from its
distributions, the same for every plan that is compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from m2flow.engine.plan import Plan
from m2flow.flow.graph import FlowGraph
from m2flow.plan.prediction import Prediction
from m2flow.plan.profile import Profile
from m2flow.plan.simulate_timing import ProfileTiming
from m2flow.plan.units import Bytes, Seconds
from m2flow.simulation.driver import SimulatedRun, Simulation
from m2flow.simulation.time_account import TERMS, where_the_time_went


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
        steps: how many steps the prediction is the mean of. Beside them, steps are played until
            the lanes hold what they hold in any later step, and until the last one is alone.
        seed: of the lengths and turns that are drawn.

    Raises:
        UserError: the profile does not know a stage, or not on such replicas.
        RunFailed: the plan does not run to its end; says who waits for whom.
    """
    warm = plan.max_staleness
    if not warm and any(lane.memory_bytes is not None for lane in plan.lanes):
        warm = 1

    timing = ProfileTiming(graph, plan, profile, seed, first_step=-warm)
    run = Simulation(graph, plan, timing).run(num_items, warm + steps + plan.max_staleness)
    return _predicted(plan, run, range(warm, warm + steps))


def _predicted(plan: Plan, run: SimulatedRun, counted: Sequence[int]) -> Prediction:
    """What a run says of a plan.

    Args:
        plan: what was played.
        run: all of it.
        counted: the steps that are spoken of, one after the other.
    """
    ends = run.step_ends
    start = ends[counted[0] - 1] if counted[0] else run.step_starts[counted[0]]
    marks = [start, *(ends[step] for step in counted)]
    each, count = [b - a for a, b in pairwise(marks)], len(counted)
    spent = where_the_time_went(run.spans, (start, marks[-1]), [lane.id for lane in plan.lanes])
    stages: dict[str, float] = {}
    for lane in spent:
        for name, seconds in lane.stages.items():
            stages[name] = stages.get(name, 0.0) + seconds
    lags = sum(run.staleness.values())
    return Prediction(
        seconds=Seconds(statistics.fmean(each)),
        spread=Seconds(statistics.pstdev(each)),
        idle={lane.lane: min(1.0, lane.share(lane.terms["waiting"])) for lane in spent},
        terms={term: Seconds(sum(one.terms[term] for one in spent) / count) for term in TERMS},
        stages={name: Seconds(seconds / count) for name, seconds in stages.items()},
        peak_bytes={lane: Bytes(size) for lane, size in run.peak_bytes.items()},
        staleness=sum(lag * n for lag, n in run.staleness.items()) / lags if lags else 0.0,
        spans=tuple(x for x in run.spans if x.end > marks[-2] and x.start < marks[-1]),
        window=(marks[-2], marks[-1]),
        num_events=run.num_events,
    )
