"""`Draft`: a plan in few numbers, which the choice can vary; and the `Plan` that it stands for.

A worker stands on neighbouring lanes of one kind. How finely a stage is cut is told by its calls a
replica, so that the calls stay as they are when a worker gets more replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from m2flow.engine.plan import Placement, Plan, StagePlan
from m2flow.flow.graph import StageNode
from m2flow.plan.choose.judge import shape, sized
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.memory import too_large
from m2flow.plan.profile import WorkerCost

AUTO = "auto"
"""Mode of a plan that was chosen freely."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a worker stands.

    Attributes:
        option: its layout.
        first: the first of its lanes, as a position among those of its kind.
        replicas: how many.
    """

    option: WorkerCost
    first: int
    replicas: int

    @property
    def end(self) -> int:
        """The position after its last lane."""
        return self.first + self.replicas * self.option.lanes

    @property
    def lanes(self) -> tuple[str, int, int]:
        """Kind, first lane and end."""
        return self.option.kind, self.first, self.end


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A plan in few numbers. Two drafts are never equal; `key` tells what they do.

    Attributes:
        spots: by worker, in the order of `PlanningProblem.workers`.
        pieces: by stage, into how many calls a replica cuts its part of a window; less than 1
            where one call has the parts of several replicas.
        running: by stage, the plan's `max_running`.
        downstream_first: whether a lane prefers the last stage that it can run to the first one.
        fused: whether loops go round on their lane, where they can.
        staleness: the plan's `max_staleness`.
    """

    spots: tuple[Spot, ...]
    pieces: tuple[float, ...]
    running: tuple[int | None, ...]
    downstream_first: bool = False
    fused: bool = True
    staleness: int = 0

    def with_spot(self, worker: int, spot: Spot) -> Draft:
        """The draft with a worker in another place."""
        return replace(self, spots=(*self.spots[:worker], spot, *self.spots[worker + 1 :]))

    def with_calls(self, stage: int, pieces: float, running: int | None) -> Draft:
        """The draft with a stage cut otherwise."""
        return replace(
            self,
            pieces=(*self.pieces[:stage], pieces, *self.pieces[stage + 1 :]),
            running=(*self.running[:stage], running, *self.running[stage + 1 :]),
        )

    def times(self, fold: int) -> Draft:
        """The draft on so many times the lanes, for so many times the items."""
        spots = (replace(x, first=fold * x.first, replicas=fold * x.replicas) for x in self.spots)
        return replace(self, spots=tuple(spots))


def key(problem: PlanningProblem, draft: Draft) -> tuple[object, ...]:
    """What a draft does: equal for drafts of the same plan."""
    return (
        tuple((id(spot.option), spot.first, spot.replicas) for spot in draft.spots),
        tuple(chunk_of(problem, draft, node) for node in problem.graph.nodes),
        draft.running,
        draft.downstream_first,
        draft.fused,
        draft.staleness,
    )


def chunk_of(problem: PlanningProblem, draft: Draft, node: StageNode) -> int:
    """Units that a call of a stage takes."""
    window, replicas = problem.windows[node.index], spot_of(problem, draft, node).replicas
    running = draft.running[node.index]
    chunk = units_of_call(window, replicas, draft.pieces[node.index])
    return chunk if running is None else min(chunk, running)


def units_of_call(window: int, replicas: int, calls: float) -> int:
    """Units of a call of a stage, of which each replica makes so many calls a window."""
    return max(1, -(-window // max(1, round(replicas * calls))))


def spot_of(problem: PlanningProblem, draft: Draft, node: StageNode) -> Spot:
    """Where a stage's worker stands."""
    return draft.spots[problem.number[node.worker]]


def obstacle(problem: PlanningProblem, draft: Draft) -> str | None:
    """Say where the memory of a lane is too small for a draft; None if it is nowhere."""
    need = next(too_large(to_plan(problem, draft), problem.graph), None)
    return None if need is None else f"{' beside '.join(need.workers)} does not fit on a lane"


def stretches(problem: PlanningProblem, draft: Draft) -> Iterator[list[int]]:
    """The workers, by number, of each stretch of lanes on which the same ones stand, or none."""
    for kind, ids in problem.ids.items():
        mine = [n for n, spot in enumerate(draft.spots) if spot.option.kind == kind]
        ends = {0, len(ids)}
        ends.update(edge for n in mine for edge in (draft.spots[n].first, draft.spots[n].end))
        for low, high in pairwise(sorted(ends)):
            yield [n for n in mine if draft.spots[n].first <= low and draft.spots[n].end >= high]


def to_plan(problem: PlanningProblem, draft: Draft) -> Plan:
    """The engine's plan of a draft, with the sizes that the profile knows."""
    placements: dict[str, Placement] = {}
    for worker, spot in zip(problem.workers, draft.spots, strict=True):
        ids = problem.ids[spot.option.kind][spot.first : spot.end]
        stands = Placement(_gangs(problem, ids, spot.option.lanes), layout=spot.option.layout)
        placements |= dict.fromkeys((*problem.companions[worker], worker), stands)
    stages = {
        node.name: StagePlan(chunk_of(problem, draft, node), draft.running[node.index])
        for node in problem.graph.nodes
    }
    order = tuple(node.name for node in reversed(problem.graph.nodes))
    plan = Plan(
        AUTO,
        problem.lanes,
        placements,
        stages,
        order=order if draft.downstream_first else (),
        max_staleness=draft.staleness,
        fuse_loops=draft.fused,
    )
    return sized(plan, problem.graph, problem.profile, problem.num_items)


def _gangs(
    problem: PlanningProblem, ids: tuple[int, ...], size: int
) -> tuple[tuple[int, ...], ...]:
    """Replicas of so many lanes: first those on one machine, then of what is left."""
    if size == 1:
        return tuple((lane,) for lane in ids)
    machines: dict[int, list[int]] = {}
    for lane in ids:
        machines.setdefault(problem.by_id[lane].node, []).append(lane)
    whole = [gang for lanes in machines.values() for gang in _cut(lanes, size)]
    used = {lane for gang in whole for lane in gang}
    return (*whole, *_cut([lane for lane in ids if lane not in used], size))


def _cut(ids: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[n : n + size]) for n in range(0, len(ids) - size + 1, size)]


def draft_of(problem: PlanningProblem, plan: Plan) -> Draft | None:
    """The draft that stands for a plan; None where no draft does."""
    spots = []
    for worker in problem.workers:
        spot = plan.placements[worker]
        first, layout = spot.lanes[0], (spot.layout, len(spot.replicas[0]))
        for option in problem.options[worker]:
            ids = problem.ids[option.kind]
            if (option.layout, option.lanes) == layout and first in ids:
                spots.append(Spot(option, ids.index(first), len(spot.replicas)))
    if len(spots) < len(problem.workers):
        return None
    pieces, running = [], []
    for node in problem.graph.nodes:
        stage, window = plan.stages.get(node.name, StagePlan()), problem.windows[node.index]
        calls = -(-window // min(stage.chunk or window, window))
        pieces.append(calls / len(plan.placements[node.worker].replicas))
        running.append(stage.max_running)
    draft = Draft(
        tuple(spots),
        tuple(pieces),
        tuple(running),
        bool(plan.order),
        plan.fuse_loops,
        plan.max_staleness,
    )
    return draft if shape(to_plan(problem, draft)) == shape(plan) else None


def structure(problem: PlanningProblem, draft: Draft) -> str:
    """The workers that share lanes, in words: `generator+verifier | learner`."""
    groups = filter(None, stretches(problem, draft))
    return " | ".join("+".join(problem.workers[n] for n in workers) for workers in groups)
