"""Does a plan fit its graph, and are its lanes possible? Every refusal names what to change."""

from __future__ import annotations

from collections import Counter

from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.engine.turns import whole_step_edges
from m2flow.errors import PlanError, suggestion
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode


def validate(plan: Plan, graph: FlowGraph, num_items: int | None = None) -> None:
    """Check a plan against the graph it is to carry out.

    Args:
        plan: the plan.
        graph: the graph.
        num_items: source items of a step, where they are known: mini-batches and edges are then
            checked against them.

    Raises:
        PlanError: the first thing that does not fit.
    """
    _check_lanes(plan.lanes)
    lane_ids = {lane.id for lane in plan.lanes}
    for worker in graph.workers:
        if worker not in plan.placements:
            raise PlanError("has no placement in the plan", key=f"placements.{worker}")
    for worker, placement in plan.placements.items():
        _check_known("placements", worker, graph.workers)
        _check_placement(worker, placement, lane_ids)
    for edge in graph.weight_edges:
        if edge.source not in plan.placements or edge.target not in plan.placements:
            raise PlanError("a weight edge has an end with no placement", key=edge.source)
    _check_memory(plan, graph)
    names = [node.name for node in graph.nodes]
    for name, stage in plan.stages.items():
        _check_known("stages", name, names)
        _check_positive(f"stages.{name}.chunk", stage.chunk)
        _check_positive(f"stages.{name}.max_running", stage.max_running)
    for name in plan.order:
        _check_known("order", name, names)
    for node in graph.nodes:
        _check_gang(node, plan.placements[node.worker])
        if num_items is not None:
            _check_minibatches(node, num_items)
    _check_edges(plan, graph, num_items)
    if plan.max_staleness < 0:
        raise PlanError("must not be negative", key="max_staleness", value=plan.max_staleness)
    if not plan.deadline_seconds > 0:  # true of a NaN as well
        raise PlanError("must be positive", key="deadline_seconds", value=plan.deadline_seconds)


def _check_lanes(lanes: tuple[LaneSpec, ...]) -> None:
    if not lanes:
        raise PlanError("a plan needs at least one lane", key="lanes")
    twice = [lane for lane, count in Counter(lane.id for lane in lanes).items() if count > 1]
    if twice:
        raise PlanError("names a lane twice", key="lanes", value=twice[0])
    for lane in lanes:
        if lane.kind not in ("cpu", "gpu"):
            raise PlanError(
                "is no kind of lane", key="lanes", value=lane.kind, expected="cpu or gpu"
            )
    cores = Counter(core for lane in lanes for core in set(lane.cores))
    gpus = Counter(lane.gpu for lane in lanes if lane.gpu is not None)
    for what, counts in (("core", cores), ("gpu", gpus)):
        shared = [number for number, count in counts.items() if count > 1]
        if shared:
            owners = [
                lane.id
                for lane in lanes
                if shared[0] in (lane.cores if what == "core" else (lane.gpu,))
            ]
            raise PlanError(f"lanes {owners} overlap on {what} {shared[0]}", key="lanes")


def _check_known(key: str, name: str, valid: tuple[str, ...] | list[str]) -> None:
    if name not in valid:
        raise PlanError(
            "is in the plan but not in the flow", key=f"{key}.{name}", hint=suggestion(name, valid)
        )


def _check_positive(key: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise PlanError("must be at least 1", key=key, value=value)


def _check_placement(worker: str, placement: Placement, lanes: set[int]) -> None:
    key = f"placements.{worker}"
    if not placement.replicas or not all(placement.replicas):
        raise PlanError("needs at least one replica of at least one lane", key=key)
    used = [lane for gang in placement.replicas for lane in gang]
    for lane in used:
        if lane not in lanes:
            raise PlanError("stands on a lane that the plan does not have", key=key, value=lane)
    if len(set(used)) != len(used):
        raise PlanError("stands twice on the same lane", key=key, value=used)


def _check_memory(plan: Plan, graph: FlowGraph) -> None:
    """A worker must fit alone, and beside the one on its lane that it takes weights from."""
    together: list[tuple[str, ...]] = [(worker,) for worker in plan.placements]
    together += [(edge.source, edge.target) for edge in graph.weight_edges]
    for lane in plan.lanes:
        for workers in together:
            spots = [plan.placements[worker] for worker in workers]
            needed = sum(spot.state_bytes for spot in spots)
            if lane.memory_bytes is None or needed <= lane.memory_bytes:
                continue
            if all(lane.id in spot.lanes for spot in spots):
                raise PlanError(
                    f"its state does not fit on lane {lane.id}"
                    + (f" beside {workers[0]}'s, whose weights it takes" if spots[1:] else ""),
                    key=f"placements.{workers[-1]}",
                    value=needed,
                    expected=f"at most {lane.memory_bytes} bytes",
                    hint="give the lane more memory or spread the worker over more lanes",
                )


def _check_minibatches(node: StageNode, num_items: int) -> None:
    units = num_items * node.fanout // _unit_items(node, num_items)
    if units % node.minibatches:
        raise PlanError(
            f"cannot cut {units} {node.unit}s of a step into mini-batches of the same size",
            key=node.name,
            value=node.minibatches,
            hint="change the items of a step or `minibatches`",
        )


def _check_gang(node: StageNode, placement: Placement) -> None:
    if any(len(gang) > 1 for gang in placement.replicas):
        for trait in ("streaming", "sticky"):
            if getattr(node, trait):
                raise PlanError(
                    f"is {trait}, so each of its replicas must be a single lane",
                    key=f"placements.{node.worker}",
                )


def _check_edges(plan: Plan, graph: FlowGraph, num_items: int | None) -> None:
    known = {
        graph.edge_name(producer, consumer): (producer, consumer)
        for producer, consumer in graph.edges
        if producer != SOURCE
    }
    for name, edge in plan.edges.items():
        _check_known("edges", name, list(known))
        _check_positive(f"edges.{name}.max_items", edge.max_items)
        _check_positive(f"edges.{name}.max_bytes", edge.max_bytes)
        loop = graph.nodes[known[name][1]].loop
        if loop is not None and loop == graph.nodes[known[name][0]].loop:
            raise PlanError("goes around inside a loop, which has no limit", key=f"edges.{name}")
    limits = {known[name]: edge for name, edge in plan.edges.items()}
    whole = set() if num_items is None else whole_step_edges(graph, limits, num_items)
    for name, edge in plan.edges.items():
        producer, consumer = known[name]
        needed = _room_needed(graph, producer, consumer, num_items)
        if num_items is not None and (producer, consumer) in whole:
            needed = num_items * graph.nodes[consumer].fanout
        if edge.max_items is not None and edge.max_items < needed:
            raise PlanError(
                "is less than the stages behind it need at once",
                key=f"edges.{name}.max_items",
                value=edge.max_items,
                expected=f"at least {needed}",
            )


def _room_needed(graph: FlowGraph, producer: int, consumer: int, num_items: int | None) -> int:
    """Items that an edge must hold, lest the stages behind it wait for ever."""
    made_at_once = _unit_items(graph.nodes[producer], num_items) * graph.nodes[producer].expands
    behind = [graph.nodes[stage] for stage in graph.between(producer, consumer)]
    return max(made_at_once, *(_unit_items(node, num_items) for node in behind))


def _unit_items(node: StageNode, num_items: int | None) -> int:
    if node.unit == "step":
        return (num_items or 1) * node.fanout
    return node.group_size if node.unit == "group" else 1
