"""Equal lanes folded: a plan for many lanes is judged by the same plan on a part of them.

On a `fold`-th of the lanes, with as many items fewer, each replica does what it would do on all of
them. What depends on the number of replicas, items or events is asked of the profile as of the
whole: `finish`, stages that need a whole step, the controller's work. What is lost is the chance
that one of many replicas has longer items than any of few.
"""

from __future__ import annotations

from dataclasses import replace

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.engine.steps import check_items
from m2flow.errors import PlanError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.prediction import Prediction
from m2flow.plan.profile import Profile, StageCost
from m2flow.plan.units import Seconds

FEWEST = 16
"""Lanes that are left when equal lanes are folded, at least."""

IDLE = 1 / 32
"""Share of the lanes that may be left over, as they do not fill a fold."""


def fold_of(problem: PlanningProblem) -> int:
    """Return how many lanes one lane of the small problem stands for; 1 where lanes are few."""
    counts = [len(ids) for ids in problem.ids.values()]
    smallest = (min(option.lanes for option in some) for some in problem.options.values())
    least = max(FEWEST, *(3 * lanes for lanes in smallest))
    return max(
        fold
        for fold in range(1, max(1, sum(counts) // least) + 1)
        if all(count >= fold and count % fold <= IDLE * count for count in counts)
        if problem.num_items % fold == 0 and _divides(problem.graph, problem.num_items // fold)
    )


def _divides(graph: FlowGraph, items: int) -> bool:
    """Whether a step of so many items has whole mini-batches."""
    try:
        check_items(graph, items)
    except PlanError:
        return False
    return True


def folded(problem: PlanningProblem, fold: int) -> PlanningProblem:
    """The problem on a part of the lanes."""
    if fold == 1:
        return problem
    lanes: list[LaneSpec] = []
    for kind, ids in problem.ids.items():
        for column in range(len(ids) // fold):
            first = problem.by_id[ids[column * fold]]
            memory = problem.memory[kind]
            lanes.append(LaneSpec(len(lanes), kind, memory_bytes=memory, node=first.node))
    profile = folded_profile(problem.profile, problem.graph, fold)
    return PlanningProblem(problem.graph, profile, lanes, problem.num_items // fold)


def folded_profile(profile: Profile, graph: FlowGraph, fold: int) -> Profile:
    """Return the profile for lanes that each stand for `fold` lanes."""
    whole = {node.name for node in graph.nodes if node.unit == "step"}

    def cost(stage: str, one: StageCost) -> StageCost:
        if one.finish is not None:
            one = replace(one, finish=one.finish.scaled(x=1 / fold))
        if stage in whole:
            working = one.working and one.working.scaled(x=1 / fold)
            one = replace(one, seconds=one.seconds.scaled(x=1 / fold), working=working)
        return one

    return replace(
        profile,
        stages={
            name: replace(stage, costs=tuple(cost(name, one) for one in stage.costs))
            for name, stage in profile.stages.items()
        },
        event_overhead=Seconds(fold * profile.event_overhead),
    )


def unfolded(
    prediction: Prediction, problem: PlanningProblem, small: PlanningProblem, plan: Plan, fold: int
) -> Prediction:
    """What a prediction on a part of the lanes says of all of them.

    Args:
        prediction: of the small plan.
        problem, small: all lanes, and the part.
        plan: on all lanes; lanes that are reserved for a worker are taken for busy all the time,
            as nobody else could use them.
        fold: lanes that were taken for one.
    """
    if fold == 1:
        return prediction
    column = {
        lane: part
        for kind, ids in problem.ids.items()
        for n, part in enumerate(small.ids[kind])
        for lane in ids[n * fold : (n + 1) * fold]
    }
    first = {part: lane for lane, part in reversed(column.items())}
    free = [lane.id for lane in plan.lanes if lane.reserved_for is None]
    peaks = prediction.peak_bytes
    return replace(
        prediction,
        idle={lane: prediction.idle[column[lane]] if lane in column else 1.0 for lane in free},
        terms={name: Seconds(fold * each) for name, each in prediction.terms.items()},
        stages={name: Seconds(fold * each) for name, each in prediction.stages.items()},
        peak_bytes={x: peaks[part] for x, part in column.items() if part in peaks},
        spans=tuple(
            replace(span, lane=first[span.lane]) for span in prediction.spans if span.lane in first
        ),
        alike={lane: first[part] for lane, part in column.items() if lane != first[part]},
    )
