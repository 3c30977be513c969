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
from m2flow.simulation.driver import Simulation
from m2flow.simulation.time_account import where_the_time_went


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
    ends = run.step_ends
    start = ends[warm - 1] if warm else run.step_starts[0]
    marks = [start, *(ends[step] for step in range(warm, warm + steps))]
    each = [after - before for before, after in pairwise(marks)]
    spent = where_the_time_went(run.spans, (start, marks[-1]), [lane.id for lane in plan.lanes])
    together = reduce(add, spent)
    lags = sum(run.staleness.values())
    return Prediction(
        seconds=Seconds(statistics.fmean(each)),
        spread=Seconds(statistics.pstdev(each)),
        idle={lane.lane: min(1.0, lane.share(lane.terms["waiting"])) for lane in spent},
        terms={term: Seconds(taken / steps) for term, taken in together.terms.items()},
        stages={name: Seconds(taken / steps) for name, taken in together.stages.items()},
        peak_bytes={lane: Bytes(size) for lane, size in run.peak_bytes.items()},
        staleness=sum(lag * n for lag, n in run.staleness.items()) / lags if lags else 0.0,
        spans=tuple(x for x in run.spans if x.end > marks[-2] and x.start < marks[-1]),
        window=(marks[-2], marks[-1]),
        num_events=run.num_events,
    )
