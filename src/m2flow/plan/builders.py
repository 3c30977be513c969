"""The fixed modes as plans: each builder gives the plan that its name says; and their companions.

They know the graph and the lanes, and no times. A worker is *trained* if it is the source of a
weight edge or has a stage that accumulates. Those that run on published weights, those with a
streaming stage and the members of a loop make the *rollout*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import PlanError, UserError, suggestion
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.plan.chunks import in_time, pipelined, spread
from m2flow.plan.isolation import isolate

T = TypeVar("T")

Builder = Callable[[FlowGraph, Sequence[LaneSpec], int, Mapping[str, Layout]], Plan]
"""Makes the plan of one mode; raises a UserError where the mode does not fit graph or lanes."""


def eager(graph: FlowGraph, lanes: Sequence[LaneSpec], *_: object) -> Plan:
    """Everything on one lane of this machine, each stage in one call after the other.

    Limits of lanes that are cores add up; of several accelerators the first one is used.
    """
    here = [lane for lane in lanes if lane.node == lanes[0].node]
    limits = [lane.memory_bytes for lane in here if lane.memory_bytes is not None]
    limit = sum(limits) if len(limits) == len(here) else None
    lane = replace(
        here[0],
        id=0,
        cores=tuple(core for lane in here for core in lane.cores),
        memory_bytes=limit if here[0].gpu is None else here[0].memory_bytes,
    )
    return Plan("eager", (lane,), {worker: Placement(((0,),)) for worker in placed(graph)})


def collocated(
    graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int, layouts: Mapping[str, Layout]
) -> Plan:
    """Every worker on every lane; each stage is spread over all lanes before the next begins."""
    placements = {worker: _placement(worker, lanes, layouts) for worker in placed(graph)}
    return Plan("collocated", tuple(lanes), placements, spread(graph, placements, num_items))


def disaggregated(
    graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int, layouts: Mapping[str, Layout]
) -> Plan:
    """Rollout and training on lanes of their own, joined by a pipeline.

    The lanes are split evenly, the odd one going to the rollout. Whatever is neither generated nor
    trained (verifiers, pure functions) stands beside the training, which is idle at first. An
    environment stands beside its policy.
    """
    rollout = _generating(graph)
    mates = {
        graph.nodes[member].worker
        for loop in graph.loops
        if any(graph.nodes[member].worker in rollout for member in loop.members)
        for member in loop.members
    }
    rollout |= mates - _trained(graph)
    first = "a stage that generates", rollout
    second = "work beside the generation", set(graph.workers) - rollout
    plan = _split("disaggregated", graph, lanes, num_items, layouts, first, second)
    return replace(plan, order=tuple(node.name for node in reversed(graph.nodes)))


def hybrid(
    graph: FlowGraph, lanes: Sequence[LaneSpec], num_items: int, layouts: Mapping[str, Layout]
) -> Plan:
    """The rollout's parts on lanes of their own, in a pipeline; then training on all lanes.

    What runs on published weights, and a loop's policy, stands on the first half of the lanes (and
    the odd one); environments, verifiers, pure functions and whatever else is not trained on the
    others. The groups of a loop ping-pong between the two.
    """
    trained = _trained(graph)
    policies = (_generating(graph, loops=False) | _policies(graph)) - trained
    others = set(graph.workers) - trained - policies
    first = "a stage that generates on a worker that is not trained", policies
    second = "an environment, a verifier or a function beside the generation", others
    return _split("hybrid", graph, lanes, num_items, layouts, first, second)


def _split(
    mode: str,
    graph: FlowGraph,
    lanes: Sequence[LaneSpec],
    num_items: int,
    layouts: Mapping[str, Layout],
    first: tuple[str, set[str]],
    second: tuple[str, set[str]],
) -> Plan:
    """The plan with workers on each half of the lanes, in a pipeline, and the others on all lanes.

    Args:
        mode, graph, lanes, num_items, layouts: of the plan.
        first, second: what the mode needs on a half, and the workers that stand there. The first
            half has the odd lane, and workers that take weights for other methods of the flow.
    """
    missing = [what for what, workers in (first, second) if not workers]
    missing += ["two lanes"] if len(lanes) < 2 else []
    if missing:
        raise UserError(
            f"{mode} needs {missing[0]}",
            key="mode",
            value=f"{len(lanes)} lanes",
            hint="use --mode collocated",
        )
    half, idle = (len(lanes) + 1) // 2, set(placed(graph)) - set(graph.workers)
    part = dict.fromkeys(second[1], lanes[half:]) | dict.fromkeys(first[1] | idle, lanes[:half])
    placements = {
        worker: _placement(worker, part.get(worker, lanes), layouts) for worker in placed(graph)
    }
    whole = frozenset(graph.workers) - part.keys()
    return Plan(mode, tuple(lanes), placements, pipelined(graph, placements, num_items, whole))


BUILDERS: Mapping[str, Builder] = {
    "eager": eager,
    "collocated": collocated,
    "disaggregated": disaggregated,
    "hybrid": hybrid,
}


def build_plan(
    mode: str,
    graph: FlowGraph,
    lanes: Sequence[LaneSpec],
    num_items: int,
    isolated: Collection[str] = (),
    layouts: Mapping[str, Layout] = MappingProxyType({}),
) -> Plan:
    """The plan of a fixed mode.

    Args:
        mode: one of BUILDERS.
        graph: what is to be planned.
        lanes: what there is; those that are reserved for a worker are only for it.
        num_items: source items of a step.
        isolated: workers that get lanes of their own (`isolated_workers`).
        layouts: worker to the layout of its replicas; ONE_LANE for those left out. An eager run
            has all workers in ONE_LANE.

    Raises:
        UserError: there is no such mode, or it, or a layout, does not fit the graph or the lanes.
    """
    if mode not in BUILDERS:
        raise UserError("is not a mode", key="mode", value=mode, hint=suggestion(mode, BUILDERS))
    for worker, layout in layouts.items():
        key = f"layouts.{worker}"
        if worker not in graph.workers:
            raise UserError("is no worker", key=key, hint=suggestion(worker, graph.workers))
        if layout.lanes < 1:
            raise UserError("needs at least one lane", key=key, value=layout.name)
        if (obstacle := layout.obstacle()) is not None:
            raise UserError(f"is not possible: {obstacle}", key=key, value=layout.name)
    free = [lane for lane in lanes if lane.reserved_for is None]
    plan = BUILDERS[mode](graph, free, num_items, layouts)
    if mode != "eager" and len(free) < len(lanes):
        plan = replace(plan, lanes=tuple(lanes))
    return isolate(plan, isolated)


def first_that_divides(
    build: Callable[[Mapping[str, Layout]], T], options: Mapping[str, Iterable[Layout]]
) -> T:
    """Make something of the first layout of each worker that divides the worker's lanes.

    Args:
        build: makes it of a layout for each worker; refuses one of them as `build_plan` does.
        options: by worker the layouts that it may have, the best first; at least one.

    Raises:
        UserError: none of a worker's layouts does, what `build` said of the best one; or what else
            `build` refuses.
    """
    left = {worker: iter(layouts) for worker, layouts in options.items()}
    chosen = {worker: next(layouts) for worker, layouts in left.items()}
    refused: dict[str, UserError] = {}
    while True:
        try:
            return build(chosen)
        except UserError as error:
            worker = (error.key or "").removeprefix("layouts.")
            following = next(left[worker], None) if worker in left else None
            if following is None:
                raise refused.get(worker, error) from None
            refused.setdefault(worker, error)
            chosen = {**chosen, worker: following}


def companion(plan: Plan, graph: FlowGraph, num_items: int, isolated: Collection[str] = ()) -> Plan:
    """The plan under which `graph` (such as an evaluation) runs beside the steps of `plan`.

    Workers keep their lanes; what the steps do not use stands on the first lane that is not
    reserved, or beside it, where it must have a process of its own: the plan has more lanes then.
    Every stage is spread evenly over the replicas of its worker, its calls cut as by `in_time`.

    Args:
        plan: what the steps run under.
        graph: the other method.
        num_items: its source items.
        isolated: workers that must have a process of their own.

    Raises:
        PlanError: the other method has workers of its own, and each lane is reserved.
    """
    free = [lane.id for lane in plan.lanes if lane.reserved_for is None]
    own = [worker for worker in placed(graph) if worker not in plan.placements]
    if own and not free:
        raise PlanError(
            f"leaves no lane for {', '.join(own)}",
            key="lanes",
            expected=f"one that is not reserved: {graph.name} runs beside the steps",
        )
    placements = {**plan.placements, **{worker: Placement(((free[0],),)) for worker in own}}
    beside = replace(
        plan,
        mode=f"{plan.mode} ({graph.name})",
        placements=placements,
        stages=in_time(graph, spread(graph, placements, num_items), num_items),
        edges={},
        order=(),
        max_staleness=0,
        predicted_seconds=None,
    )
    return isolate(beside, set(isolated) - plan.placements.keys())


def placed(graph: FlowGraph) -> tuple[str, ...]:
    """Workers that need lanes: those of the stages, and those that only take published weights."""
    targets = [edge.target for edge in graph.weight_edges]
    return tuple(dict.fromkeys([*graph.workers, *targets]))


def _trained(graph: FlowGraph) -> set[str]:
    sources = {edge.source for edge in graph.weight_edges}
    return sources | {node.worker for node in graph.nodes if node.accumulates}


def _generating(graph: FlowGraph, loops: bool = True) -> set[str]:
    """Workers that run on published weights, or where there are none, those that roll out."""
    targets = {edge.target for edge in graph.weight_edges} & set(graph.workers)
    return targets or {
        node.worker for node in graph.nodes if node.streaming or (loops and node.loop is not None)
    }


def _policies(graph: FlowGraph) -> set[str]:
    """For each loop with no member that is trained or takes weights: its last one."""
    known = _trained(graph) | {edge.target for edge in graph.weight_edges}
    loops = [[graph.nodes[member].worker for member in loop.members] for loop in graph.loops]
    return {workers[-1] for workers in loops if known.isdisjoint(workers)}


def _placement(worker: str, lanes: Sequence[LaneSpec], layouts: Mapping[str, Layout]) -> Placement:
    """Replicas on neighbouring lanes, as many lanes each as the worker's layout has."""
    layout, ids = layouts.get(worker, ONE_LANE), [lane.id for lane in lanes]
    size = layout.lanes
    if len(ids) % size:
        divisors = [str(n) for n in range(1, len(ids) + 1) if len(ids) % n == 0]
        raise UserError(
            f"the worker's {len(ids)} lanes cannot be divided into replicas of {size} lanes",
            key=f"layouts.{worker}",
            value=layout.name,
            expected=f"a layout of {' or '.join(divisors)} lanes",
        )
    replicas = tuple(tuple(ids[n : n + size]) for n in range(0, len(ids), size))
    return Placement(replicas, layout=layout.name)
