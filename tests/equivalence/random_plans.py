"""Random plans that fit a flow: whatever a person could write down and `validate` accepts.

A plan is drawn from a `random.Random`, so that a seed names it; the Hypothesis strategy draws from
the same generator, with dice that Hypothesis can shrink.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType

from hypothesis import strategies as st

from m2flow.errors import PlanError
from m2flow.flow import SOURCE, FlowGraph
from m2flow.plan import (
    EdgePlan,
    LaneSpec,
    Placement,
    Plan,
    StagePlan,
    validate,
)
from m2flow.plan.builders import placed
from m2flow.plan.chunks import window_units
from m2flow.plan.isolation import isolate
from m2flow.plan.memory import needs

NOTHING: Mapping[str, int] = MappingProxyType({})


def random_plan(
    graph: FlowGraph,
    lanes: Sequence[LaneSpec],
    num_items: int,
    random: Random,
    *,
    state_bytes: Mapping[str, int] = NOTHING,
    working_bytes: Mapping[str, int] = NOTHING,
    gangs_allowed: Collection[str] = (),
    isolated: Collection[str] = (),
) -> Plan:
    """A plan on these lanes, on-policy, that `validate` accepts.

    Drawn are the lanes of each worker, its replicas or gangs, chunks, running items, switch points,
    the order of stages, limits of edges, whether loops are fused, and limits of memory under which
    the workers of a lane must make way for each other.

    Args:
        graph: the flow.
        lanes: what there is; their own memory limits are replaced.
        num_items: source items of a step.
        random: the dice.
        state_bytes, working_bytes: sizes by worker.
        gangs_allowed: workers of which several lanes may take part in one call.
        isolated: workers that must have a process of their own.
    """
    placements = {
        worker: Placement(
            _replicas(graph, worker, [lane.id for lane in lanes], random, worker in gangs_allowed),
            state_bytes.get(worker, 0),
            working_bytes.get(worker, 0),
        )
        for worker in placed(graph)
    }
    names = [node.name for node in graph.nodes]
    random.shuffle(names)
    plan = Plan(
        mode="random",
        lanes=tuple(lanes),
        placements=placements,
        stages=_stages(graph, placements, num_items, random),
        edges=_edges(graph, num_items, random),
        order=tuple(names) if random.random() < 0.7 else (),
        fuse_loops=random.random() < 0.5,
    )
    plan = _with_limits(isolate(plan, isolated), graph, random)
    plan = _with_room(plan, graph, num_items)
    validate(plan, graph, num_items, isolated)
    return plan


def random_plans(
    graph: FlowGraph,
    lanes: Sequence[LaneSpec],
    num_items: int,
    *,
    state_bytes: Mapping[str, int] = NOTHING,
    working_bytes: Mapping[str, int] = NOTHING,
    gangs_allowed: Collection[str] = (),
    isolated: Collection[str] = (),
) -> st.SearchStrategy[Plan]:
    """The same as a strategy of Hypothesis."""
    return st.randoms(use_true_random=False).map(
        lambda random: random_plan(
            graph,
            lanes,
            num_items,
            random,
            state_bytes=state_bytes,
            working_bytes=working_bytes,
            gangs_allowed=gangs_allowed,
            isolated=isolated,
        )
    )


def _replicas(
    graph: FlowGraph, worker: str, lanes: list[int], random: Random, may_gang: bool
) -> tuple[tuple[int, ...], ...]:
    """Some of the lanes in any order, one a replica, or in gangs of one size."""
    chosen = random.sample(lanes, random.randint(1, len(lanes)))
    nodes = [node for node in graph.nodes if node.worker == worker]
    size = 1
    if may_gang and not any(node.streaming or node.sticky for node in nodes):
        size = random.choice([n for n in range(1, len(chosen) + 1) if len(chosen) % n == 0])
    return tuple(tuple(chosen[n : n + size]) for n in range(0, len(chosen), size))


def _stages(
    graph: FlowGraph, placements: Mapping[str, Placement], num_items: int, random: Random
) -> dict[str, StagePlan]:
    stages = {}
    for node in graph.nodes:
        if random.random() < 0.15:
            continue  # one call for each window
        units = max(1, window_units(node, num_items))
        chunk = random.choice([None, 1, units, random.randint(1, units)])
        running = random.choice([None, 1, random.randint(1, units)]) if node.streaming else None
        stages[node.name] = StagePlan(chunk, running)
    return stages


def _edges(graph: FlowGraph, num_items: int, random: Random) -> dict[str, EdgePlan]:
    """Limits that may be too tight still; see `_with_room`."""
    edges = {}
    for producer, consumer in graph.edges:
        reader = graph.nodes[consumer]
        inside = producer != SOURCE and reader.loop is not None
        inside = inside and graph.nodes[producer].loop == reader.loop
        if producer == SOURCE or inside or random.random() < 0.5:
            continue
        edges[graph.edge_name(producer, consumer)] = EdgePlan(
            random.choice([None, random.randint(1, num_items * reader.fanout)]),
            random.choice([None, random.randint(1, 4096)]),
        )
    return edges


def _with_limits(plan: Plan, graph: FlowGraph, random: Random) -> Plan:
    """Memory limits on some lanes: room for what one command needs, and not for everybody."""
    lanes = []
    for lane in plan.lanes:
        least = max(
            (need.num_bytes for need in needs(plan, graph) if need.lane == lane.id), default=0
        )
        spots = [spot for spot in plan.placements.values() if lane.id in spot.lanes]
        everybody = sum(spot.state_bytes for spot in spots)
        tight = least < everybody and random.random() < 0.7
        limit = random.randint(least, everybody - 1) if tight else None
        lanes.append(replace(lane, memory_bytes=limit))
    return replace(plan, lanes=tuple(lanes))


def _with_room(plan: Plan, graph: FlowGraph, num_items: int) -> Plan:
    """The plan with the limits of its edges widened where the run could not end."""
    while True:
        try:
            validate(plan, graph, num_items)
        except PlanError as error:
            name, _, what = str(error.key).removeprefix("edges.").rpartition(".")
            if what != "max_items":
                raise
            least = int(str(error.args[0]).rpartition("at least ")[2])
            edges = {**plan.edges, name: replace(plan.edges[name], max_items=least)}
            plan = replace(plan, edges=edges)
        else:
            return plan
