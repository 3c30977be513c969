"""`simulate`: what a plan would take, by playing the engine under a virtual clock.

The engine is the one that runs the flow, so chunks, back-pressure, context switches, turns, weights
and staleness are as they will be; only the seconds come from a profile. Lengths are drawn from its
distributions, the same for every plan that is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.flow.graph import FlowGraph
from m2flow.plan.prediction import Prediction
from m2flow.plan.profile import Profile
from m2flow.plan.simulate_account import predicted
from m2flow.plan.simulate_timing import ProfileTiming
from m2flow.plan.units import Bytes, Items
from m2flow.simulation.driver import SimulatedRun, Simulation


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
    counted = range(warm, warm + steps)
    return predicted(plan, run, counted, _peaks(graph, plan, timing, run.spans))


def played(
    graph: FlowGraph, plan: Plan, profile: Profile, num_items: int, *, steps: int = 1, seed: int = 0
) -> SimulatedRun:
    """The run itself, from the first step on."""
    timing = ProfileTiming(graph, plan, profile, seed)
    return Simulation(graph, plan, timing).run(num_items, steps)


def _peaks(
    graph: FlowGraph, plan: Plan, timing: ProfileTiming, spans: Sequence[Span]
) -> Mapping[int, Bytes]:
    """For lanes without a limit: all states there, and the call that works with most."""
    stage = {node.name: node for node in graph.nodes}
    largest: dict[int, dict[str, int]] = {lane.id: {} for lane in plan.lanes}
    for span in spans:
        items = span.args.get("items")
        if span.kind == "call" and isinstance(items, int):
            own = largest[span.lane]
            own[span.name] = max(own.get(span.name, 0), items)
    there: dict[int, list[str]] = {lane.id: [] for lane in plan.lanes}
    for worker, spot in plan.placements.items():
        for number in spot.lanes:
            there[number].append(worker)
    peaks = {}
    for lane in plan.lanes:
        if lane.memory_bytes is not None:
            continue
        states = 0
        for worker in there[lane.id]:
            known = timing.worker(worker, lane.id)
            states += plan.placements[worker].state_bytes or (known.state_bytes if known else 0)
        working = 0
        for name, items in largest[lane.id].items():
            cost = timing.cost(stage[name], lane.id)
            working = max(working, cost.working_bytes(Items(items * cost.lanes)))
        if states + working:
            peaks[lane.id] = Bytes(states + working)
    return peaks
