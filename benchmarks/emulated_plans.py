"""Plans that nobody searched for: by hand, as a person would try them, and at random.

They stand beside the fixed modes and the planner's own plan in the emulation, so that a planner
which misses a whole kind of plans is found out. A plan by hand has a name that says what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan import build_plan, validate
from m2flow.plan.chunks import pipelined, spread, window_units

EIGHTHS = (2, 3, 5, 6)
"""Of the lanes, for the rollout; halves are what a fixed mode does."""

ATTEMPTS = 200
"""Random plans that may break a rule before a valid one is found."""


def by_hand(graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int) -> dict[str, Plan]:
    """Plans with names; those that break a rule are left out."""
    lanes = tuple(lanes)
    found = {
        **dict(_collocated(graph, lanes, num_items)),
        **dict(_split(graph, lanes, num_items)),
        **dict(_chain(graph, lanes, num_items)),
        **dict(_loops(graph, lanes, num_items)),
    }
    return {name: plan for name, plan in found.items() if _valid(plan, graph, num_items)}


def at_random(
    graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int, count: int, seed: int = 0
) -> dict[str, Plan]:
    """Valid plans: workers on neighbouring parts of the lanes, calls and feeding of any size."""
    random, found = Random(seed), {}
    for _ in range(ATTEMPTS):
        if len(found) == count:
            break
        plan = _random(graph, tuple(lanes), num_items, random)
        if _valid(plan, graph, num_items):
            found[f"random {len(found) + 1}"] = plan
    return found


def _valid(plan: Plan, graph: FlowGraph, num_items: int) -> bool:
    try:
        validate(plan, graph, num_items)
    except UserError:
        return False
    return True


# --- by hand --------------------------------------------------------------------------------------


def _collocated(
    graph: FlowGraph, lanes: tuple[LaneSpec, ...], num_items: int
) -> Iterator[tuple[str, Plan]]:
    """Everything everywhere, in smaller calls, or with generation that is fed."""
    plan = build_plan("collocated", graph, lanes, num_items)
    latest_first = tuple(node.name for node in reversed(graph.nodes))
    for pieces in (2, 4):
        stages = {
            name: replace(stage, chunk=-(-(stage.chunk or 1) // pieces))
            for name, stage in plan.stages.items()
        }
        yield f"collocated, {pieces} pieces", replace(plan, mode="custom", stages=stages)
    for node in graph.nodes:
        for prompts in (1, 2, 4) if node.streaming else ():
            fed = StagePlan(chunk=prompts, max_running=prompts)
            stages = {**plan.stages, node.name: fed}
            yield f"collocated, fed {prompts}", replace(plan, mode="custom", stages=stages)
            if prompts == 2:
                yield (
                    "collocated, fed 2, later stages first",
                    replace(plan, mode="custom", stages=stages, order=latest_first),
                )


def _split(
    graph: FlowGraph, lanes: tuple[LaneSpec, ...], num_items: int
) -> Iterator[tuple[str, Plan]]:
    """The rollout on some of the lanes, everybody else on the others, in a pipeline."""
    for eighths in EIGHTHS:
        cut = max(1, eighths * len(lanes) // 8)
        rollout = {node.worker for node in graph.nodes if node.streaming or node.loop is not None}
        placements = {
            worker: _on(lanes[:cut] if worker in rollout else lanes[cut:])
            for worker in graph.workers
        }
        yield (
            f"rollout on {eighths}/8",
            _pipeline(graph, lanes, placements, num_items),
        )


def _chain(
    graph: FlowGraph, lanes: tuple[LaneSpec, ...], num_items: int
) -> Iterator[tuple[str, Plan]]:
    """Half of the lanes for the rollout, each other worker with an equal part of the rest."""
    if graph.loops:
        return
    stateful = [w for w in graph.workers if not _function(graph, w)]
    rollout = next(node.worker for node in graph.nodes if node.streaming)
    others = [worker for worker in stateful if worker != rollout]
    each = len(lanes) // 2 // len(others)
    if not each:
        return
    first = len(lanes) - each * len(others)
    placements = {rollout: _on(lanes[:first])}
    for number, worker in enumerate(others):
        start = first + number * each
        placements[worker] = _on(lanes[start : start + each])
    for worker in graph.workers:
        placements.setdefault(worker, placements[others[0]])
    yield "each on its own lanes", _pipeline(graph, lanes, placements, num_items)
    training = {node.worker for node in graph.nodes if node.accumulates}
    everywhere = {w: _on(lanes) if w in training else spot for w, spot in placements.items()}
    yield "training everywhere, the others apart", _pipeline(graph, lanes, everywhere, num_items)


def _loops(
    graph: FlowGraph, lanes: tuple[LaneSpec, ...], num_items: int
) -> Iterator[tuple[str, Plan]]:
    """A loop's members side by side, in groups that take turns; training on all lanes."""
    if not graph.loops:
        return
    members = [graph.nodes[index] for index in graph.loops[0].members]
    for eighths in (2, 3, 4, 5):
        for groups in (2, 3):
            cut = max(1, eighths * len(lanes) // 8)
            parts = {members[0].worker: lanes[cut:], members[-1].worker: lanes[:cut]}
            placements = {w: _on(parts.get(w, lanes)) for w in graph.workers}
            stages = spread(graph, placements, num_items)
            for node in members:
                calls = groups * len(placements[node.worker].replicas)
                stages[node.name] = StagePlan(chunk=max(1, -(-num_items // calls)))
            yield (
                f"{members[-1].worker} on {eighths}/8, {groups} groups",
                Plan("custom", lanes, placements, stages, fuse_loops=False),
            )


def _pipeline(
    graph: FlowGraph,
    lanes: tuple[LaneSpec, ...],
    placements: Mapping[str, Placement],
    num_items: int,
) -> Plan:
    order = tuple(node.name for node in reversed(graph.nodes))
    return Plan("custom", lanes, placements, pipelined(graph, placements, num_items), order=order)


def _on(lanes: Sequence[LaneSpec]) -> Placement:
    return Placement(tuple((lane.id,) for lane in lanes))


def _function(graph: FlowGraph, worker: str) -> bool:
    return all(node.is_function for node in graph.nodes if node.worker == worker)


# --- at random ------------------------------------------------------------------------------------


def _random(graph: FlowGraph, lanes: tuple[LaneSpec, ...], num_items: int, random: Random) -> Plan:
    cuts = sorted(random.sample(range(1, 8), random.choice((0, 1, 1, 2))))
    bounds = [0, *(cut * len(lanes) // 8 for cut in cuts), len(lanes)]
    parts = [lanes[start:end] for start, end in pairwise(bounds)]
    choices = [*parts, lanes]
    placements = {worker: _on(random.choice(choices)) for worker in graph.workers}
    stages = {}
    for node in graph.nodes:
        stages[node.name] = _random_stage(node, len(placements[node.worker].replicas), num_items,
                                          random)  # fmt: skip
    order = tuple(node.name for node in reversed(graph.nodes)) if random.random() < 0.5 else ()
    fuse = random.random() < 0.5
    return Plan("custom", lanes, placements, stages, order=order, fuse_loops=fuse)


def _random_stage(node: StageNode, replicas: int, num_items: int, random: Random) -> StagePlan:
    calls = replicas * random.choice((1, 1, 2, 4))
    chunk = max(1, -(-window_units(node, num_items) // calls))
    fed = node.streaming and random.random() < 0.5
    return StagePlan(chunk, random.choice((1, 2, 4)) if fed else None)
