"""`Judge`: simulates plans, each once, and counts what it did.

The number of simulations is limited, not their time: what is chosen does not depend on how fast the
machine is that chooses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf

from m2flow.engine.plan import Plan, StagePlan
from m2flow.errors import RunFailed, UserError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.chunks import call_items
from m2flow.plan.memory import with_sizes
from m2flow.plan.prediction import Candidate
from m2flow.plan.profile import Profile
from m2flow.plan.simulate import simulate
from m2flow.plan.units import Items
from m2flow.plan.validate import validate

Shape = tuple[object, ...]


class Judge:
    """Plans of one flow on one machine.

    Args:
        graph, profile, num_items: what is planned.
        isolated: workers that must stand on lanes of their own.

    Attributes:
        num_simulated: simulations so far.
        num_events: events that the engine has handled in them.
        ruled_out: plans that break a limit, or whose price nobody knows, and why.
    """

    def __init__(
        self, graph: FlowGraph, profile: Profile, num_items: int, isolated: Collection[str] = ()
    ) -> None:
        self.graph, self.profile, self.num_items = graph, profile, num_items
        self.isolated = isolated
        self.num_simulated = self.num_events = 0
        self.ruled_out: dict[str, str] = {}
        self._known: dict[tuple[Shape, int], Candidate | None] = {}

    def candidate(self, plan: Plan, name: str, steps: int = 1) -> Candidate | None:
        """A plan with its prediction; None if it is ruled out.

        Args:
            plan: any plan of the flow.
            name: by which it is told if it is ruled out.
            steps: that are simulated.
        """
        key = shape(plan), steps
        if key not in self._known:
            self._known[key] = self._judged(plan, name, steps)
        return self._known[key]

    def _judged(self, plan: Plan, name: str, steps: int) -> Candidate | None:
        endless = replace(plan, deadline_seconds=inf)
        try:
            validate(endless, self.graph, self.num_items, self.isolated)
            self.num_simulated += 1
            prediction = simulate(self.graph, endless, self.profile, self.num_items, steps=steps)
        except (UserError, RunFailed) as error:
            self.ruled_out.setdefault(name, str(error).splitlines()[0])
            return None
        self.num_events += prediction.num_events
        return Candidate(replace(plan, predicted_seconds=float(prediction.seconds)), prediction)


def shape(plan: Plan) -> Shape:
    """What a plan does, without its name, the sizes of states, and what is predicted of it."""
    spots = (plan.placements[worker] for worker in sorted(plan.placements))
    return (
        tuple((spot.replicas, spot.layout) for spot in spots),
        tuple((name, plan.stages[name]) for name in sorted(plan.stages)),
        tuple((name, plan.edges[name]) for name in sorted(plan.edges)),
        plan.order,
        plan.max_staleness,
        plan.fuse_loops,
    )


def sized(plan: Plan, graph: FlowGraph, profile: Profile, num_items: int) -> Plan:
    """The plan with the sizes of states and calls that the profile knows."""
    states: dict[str, int] = {}
    working: dict[str, int] = {}
    kind_of = {lane.id: lane.kind for lane in plan.lanes}
    for worker, spot in plan.placements.items():
        gang = spot.replicas[0]
        on = worker, len(gang), kind_of[gang[0]]
        state = profile.worker(*on, spot.layout) or profile.worker(*on)
        if state is not None:
            states[worker] = state.state_bytes
    for node in graph.nodes:
        spot, stage = plan.placements[node.worker], plan.stages.get(node.name, StagePlan())
        gang = spot.replicas[0]
        try:
            cost = profile.cost(
                node.name, spot.layout, len(gang), kind_of[gang[0]], stage.max_running
            )
        except UserError:  # the simulation of the plan will refuse it, and say why
            continue
        size = cost.working_bytes(Items(call_items(node, stage, num_items)))
        working[node.worker] = max(working.get(node.worker, 0), size)
    return with_sizes(plan, states, working)
