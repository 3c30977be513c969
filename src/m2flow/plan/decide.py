"""`decide`: from a graph, a profile and lanes to the plan that is run, and what it was chosen from.

The search gives a few different plans, the fixed modes theirs; the best ones are tried with smaller
calls of single stages, and where a stage may hand its tail on, with a switch point. All of them are
played through the engine on the same draws of lengths; the fastest one is chosen. Of those that are
as good as the fastest the one is taken that asks for less: fewer steps of staleness, then the plan
of a fixed mode.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.worker import Layout
from m2flow.plan.builders import BUILDERS, DEFAULT_LAYOUTS, build_plan
from m2flow.plan.chunks import window_units
from m2flow.plan.isolation import isolate
from m2flow.plan.memory import with_sizes
from m2flow.plan.prediction import Candidate, Decision, Prediction
from m2flow.plan.profile import Profile, StageCost
from m2flow.plan.refining import finer
from m2flow.plan.search import Found, Limits, candidates, problem, to_plan
from m2flow.plan.simulate import simulate
from m2flow.plan.switching import with_switch_points
from m2flow.plan.units import Items
from m2flow.plan.validate import validate

KEEP = 6
"""So many plans of the search are simulated."""

REFINED, HALVINGS = 2, 3
"""So many of the fastest plans of each staleness are tried with one stage's calls half as large,
and so often."""

SWITCHED = 3
"""Of so many of the fastest plans those with a switch point are simulated too."""

STEPS = 3
"""Steps of a simulation."""

AS_GOOD = 0.01
"""Relative difference of predicted seconds up to which two plans count as equally fast."""

UNMEASURED = 0.05
"""A plan with a switch point must be predicted to be faster by this share, where nobody has
measured what it takes to go on with items that were begun elsewhere."""

MODES = tuple(mode for mode in BUILDERS if mode != "eager")


def decide(
    graph: FlowGraph,
    profile: Profile,
    lanes: Sequence[LaneSpec],
    num_items: int,
    *,
    max_staleness: int = 0,
    isolated: Collection[str] = (),
    limits: Limits | None = None,
    layouts: Mapping[str, Layout] = DEFAULT_LAYOUTS,
    keep: int = KEEP,
    beside: Sequence[Plan] = (),
    budget: float | None = None,
) -> Decision:
    """The best plan of a step.

    Args:
        graph, profile: the flow, and what is known of its stages on such lanes.
        lanes: what there is. Those that are reserved for a worker are only for it; where there are
            none for a worker that must be isolated, they are added.
        num_items: source items of a step.
        max_staleness: how many steps generation may run ahead; a budget, not a wish.
        isolated: workers that get lanes of their own.
        limits: resources that belong to no lane.
        layouts: for the plans of the fixed modes, as in `build_plan`.
        keep: so many plans of the search are simulated.
        beside: further plans to be judged, such as the one that runs.
        budget: about how many seconds simulating may take; None for no limit. Where it is short, a
            simulation is of one step, and those plans are left out that come last: the ones with a
            switch point.

    Raises:
        UserError: no plan keeps the limits, or the profile does not know a stage.
    """
    start = time.perf_counter()
    free = tuple(lane for lane in lanes if lane.reserved_for is None)
    stated = problem(graph, profile, free, num_items, limits)
    judge = _Judge(graph, profile, num_items, isolated, budget)
    judge.consider((plan, None) for plan in beside)
    searched = candidates(stated, max_staleness, keep)
    fixed = _fixed(graph, profile, free, num_items, layouts, max_staleness)
    proposed = [(to_plan(stated, found, free), found) for found in searched]
    judge.consider(
        (isolate(replace(plan, lanes=tuple(lanes)), isolated), found)
        for plan, found in (*proposed, *((plan, None) for plan in fixed))
    )
    for _ in range(HALVINGS):
        for staleness in range(max_staleness + 1):
            alike = [one for one in judge.ranked() if one.plan.max_staleness == staleness]
            for known in alike[:REFINED]:
                judge.consider((plan, known.found) for plan in finer(known.plan, graph))
    for known in judge.ranked()[:SWITCHED]:
        later = with_switch_points(known.plan, graph, num_items=num_items)
        judge.consider((plan, known.found) for plan in later)
    ranked = judge.ranked()
    if not ranked:
        raise UserError(
            "no plan keeps the limits of these lanes",
            key="lanes",
            value=len(lanes),
            hint="more lanes, more memory for each, or layouts over several lanes",
        )
    chosen = judge.best(ranked)
    return Decision(
        chosen,
        tuple(other for other in ranked if other is not chosen),
        profile,
        num_items,
        time.perf_counter() - start,
        _frontier(judge, ranked, max_staleness),
    )


class _Judge:
    """Simulates plans that are valid, each once."""

    def __init__(
        self,
        graph: FlowGraph,
        profile: Profile,
        num_items: int,
        isolated: Collection[str],
        budget: float | None,
    ) -> None:
        self.graph, self.profile, self.num_items = graph, profile, num_items
        self.isolated, self.left = isolated, budget
        self._steps: int | None = STEPS if budget is None else None
        self._seen: list[tuple[object, ...]] = []
        self._judged: list[Candidate] = []

    def consider(self, plans: Iterable[tuple[Plan, Found | None]]) -> None:
        """Simulate plans that are not known yet; those that break a limit are left out."""
        for plan, found in plans:
            if self.left is not None and self.left <= 0 and self._judged:
                return
            shape = (plan.placements, plan.stages, plan.edges, plan.order, plan.max_staleness)
            if shape in self._seen:
                continue
            self._seen.append(shape)
            try:
                validate(plan, self.graph, self.num_items, self.isolated)
                prediction = self._simulated(plan)
            except UserError:  # it breaks a limit, or nobody knows what it would take
                continue
            plan = replace(plan, predicted_seconds=float(prediction.seconds))
            self._judged.append(Candidate(plan, prediction, found))

    def _simulated(self, plan: Plan) -> Prediction:
        """The same number of steps of each plan: STEPS, or one where STEPS take too long."""
        start = time.perf_counter()
        steps = self._steps or 1
        prediction = simulate(self.graph, plan, self.profile, self.num_items, steps=steps)
        took = time.perf_counter() - start
        if self.left is not None:
            self.left -= took
        if self._steps is None:
            assert self.left is not None
            self._steps = STEPS if STEPS * (KEEP + len(MODES)) * took < self.left else 1
            if self._steps > 1:
                return self._simulated(plan)
        return prediction

    def ranked(self) -> list[Candidate]:
        """Fastest first."""
        return sorted(self._judged, key=lambda one: one.prediction.seconds)

    def best(self, ranked: Sequence[Candidate]) -> Candidate:
        """Of those that are as good as the fastest the one that asks for least."""
        most = min(map(self._trusted_seconds, ranked)) * (1 + AS_GOOD)
        as_good = [one for one in ranked if self._trusted_seconds(one) <= most]
        return min(as_good, key=lambda one: (one.plan.max_staleness, one.found is not None))

    def _trusted_seconds(self, one: Candidate) -> float:
        """Predicted seconds, with an allowance for items taken up again at an unknown price."""
        unknown = not all(self._knows_resuming(one.plan, node) for node in self.graph.nodes)
        return one.prediction.seconds * (1 + UNMEASURED if unknown else 1)

    def _knows_resuming(self, plan: Plan, node: StageNode) -> bool:
        """Whether it was measured what it takes a stage to go on with items, if it has to."""
        if node.name not in plan.stages or plan.stages[node.name].switch_at is None:
            return True
        gang = len(plan.placements[node.worker].replicas[0])
        layout = layout_of(self.profile, node.name, gang, plan)
        measured = self.profile.source == "measured"
        return measured and layout is not None and layout.resume is not None


def _frontier(
    judge: _Judge, ranked: Sequence[Candidate], max_staleness: int
) -> tuple[Candidate, ...]:
    """The best for each staleness, where it is faster than with one less."""
    kept: list[Candidate] = []
    for staleness in range(max_staleness + 1):
        allowed = [one for one in ranked if one.plan.max_staleness <= staleness]
        if not allowed:
            continue
        best = judge.best(allowed)
        faster = not kept or best.prediction.seconds < kept[-1].prediction.seconds * (1 - AS_GOOD)
        if faster:
            kept.append(best)
    return tuple(kept)


def _fixed(
    graph: FlowGraph,
    profile: Profile,
    lanes: Sequence[LaneSpec],
    num_items: int,
    layouts: Mapping[str, Layout],
    max_staleness: int,
) -> Iterator[Plan]:
    """The plans of the fixed modes that fit, with and without staleness."""
    for mode in MODES:
        try:
            plan = build_plan(mode, graph, lanes, num_items, layouts=layouts)
        except UserError:  # it has no place for this graph on these lanes
            continue
        if not _known(plan, graph, profile):
            continue
        plan = sized(plan, graph, profile, num_items)
        for staleness in range(max_staleness + 1):
            yield replace(plan, max_staleness=staleness)


def _known(plan: Plan, graph: FlowGraph, profile: Profile) -> bool:
    """Whether the profile has a price for each stage as it is laid out."""
    return all(
        layout_of(profile, node.name, len(plan.placements[node.worker].replicas[0]), plan)
        for node in graph.nodes
    )


def layout_of(profile: Profile, stage: str, gang: int, plan: Plan) -> StageCost | None:
    """A stage's layout on gangs of so many lanes of the plan's kind; None if there is no price."""
    kinds = {lane.kind for lane in plan.lanes}
    return next(
        (
            layout
            for layout in profile.stage(stage).costs
            if layout.lanes == gang and layout.kind in kinds
        ),
        None,
    )


def sized(plan: Plan, graph: FlowGraph, profile: Profile, num_items: int) -> Plan:
    """The plan with the sizes of states and calls that the profile knows."""
    states: dict[str, int] = {}
    working: dict[str, int] = {}
    for worker, spot in plan.placements.items():
        gang = len(spot.replicas[0])
        for kind in {lane.kind for lane in plan.lanes if lane.id in spot.lanes}:
            state = profile.worker(worker, gang, kind)
            if state is not None:
                states[worker] = max(states.get(worker, 0), state.state_bytes)
    for node in graph.nodes:
        layout = layout_of(profile, node.name, len(plan.placements[node.worker].replicas[0]), plan)
        if layout is None:
            continue
        units = window_units(node, num_items)
        stage = plan.stages.get(node.name)
        chunk = min(stage.chunk or units, units) if stage else units
        items = {"item": 1, "group": node.group_size, "step": num_items * node.fanout}[node.unit]
        size = layout.working_bytes(Items(chunk * items))
        working[node.worker] = max(working.get(node.worker, 0), size)
    return with_sizes(plan, states, working)
