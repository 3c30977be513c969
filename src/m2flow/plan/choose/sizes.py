"""What a profile says of the sizes of a plan's workers; and the draft that a plan amounts to."""

from __future__ import annotations

from m2flow.engine.plan import Plan, StagePlan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.choose.draft import Draft, Spot
from m2flow.plan.choose.problem import Problem
from m2flow.plan.chunks import unit_items, window_units
from m2flow.plan.memory import with_sizes
from m2flow.plan.profile import Profile
from m2flow.plan.units import Items


def sized(plan: Plan, graph: FlowGraph, profile: Profile, num_items: int) -> Plan:
    """The plan with the sizes of states and calls that the profile knows."""
    states: dict[str, int] = {}
    working: dict[str, int] = {}
    kind_of = {lane.id: lane.kind for lane in plan.lanes}
    for worker, spot in plan.placements.items():
        gang = spot.replicas[0]
        state = profile.worker(worker, len(gang), kind_of[gang[0]], spot.layout)
        if state is not None:
            states[worker] = state.state_bytes
    for node in graph.nodes:
        spot, stage = plan.placements[node.worker], plan.stages.get(node.name, StagePlan())
        gang, units = spot.replicas[0], window_units(node, num_items)
        try:
            cost = profile.cost(
                node.name, spot.layout, len(gang), kind_of[gang[0]], stage.max_running
            )
        except UserError:  # whoever simulates the plan will refuse it, and say why
            continue
        items = min(stage.chunk or units, units) * unit_items(node, num_items)
        size = cost.working_bytes(Items(items))
        working[node.worker] = max(working.get(node.worker, 0), size)
    return with_sizes(plan, states, working)


def draft_of(problem: Problem, plan: Plan) -> Draft | None:
    """The draft of a plan whose workers each stand on neighbouring lanes; None of another one."""
    spots = []
    for worker in problem.workers:
        spot = plan.placements[worker]
        size = len(spot.replicas[0])
        option = next(
            (
                option
                for option in problem.options[worker]
                if (option.layout, option.lanes) == (spot.layout, size)
                and set(spot.lanes) <= set(problem.ids[option.kind])
            ),
            None,
        )
        if option is None or any(len(gang) != size for gang in spot.replicas):
            return None
        ids = problem.ids[option.kind]
        first = min(ids.index(lane) for lane in spot.lanes)
        if set(ids[first : first + len(spot.lanes)]) != set(spot.lanes):
            return None
        spots.append(Spot(option, first, len(spot.replicas)))
    pieces, running = [], []
    for node in problem.graph.nodes:
        stage, window = plan.stages.get(node.name, StagePlan()), problem.windows[node.index]
        calls = -(-window // min(stage.chunk or window, window))
        replicas = len(plan.placements[node.worker].replicas)
        pieces.append(calls / replicas)
        running.append(stage.max_running)
    names = tuple(node.name for node in reversed(problem.graph.nodes))
    return Draft(
        tuple(spots),
        tuple(pieces),
        tuple(running),
        plan.order == names,
        plan.fuse_loops,
        plan.max_staleness,
    )
