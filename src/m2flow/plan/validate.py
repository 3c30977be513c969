"""Does a plan fit its graph, and are its lanes possible? Every refusal names what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import inf
from types import MappingProxyType

from m2flow.engine.plan import LONGEST_DEADLINE, LaneSpec, Placement, Plan
from m2flow.engine.steps import check_items
from m2flow.engine.turns import whole_step_edges
from m2flow.errors import PlanError, suggestion
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.plan.builders import placed
from m2flow.plan.memory import check_memory
from m2flow.plan.profile.hardware import DEVICES


def validate(
    plan: Plan,
    graph: FlowGraph,
    num_items: int,
    isolated: Collection[str] = (),
    layouts: Mapping[str, Collection[Layout]] = MappingProxyType({}),
    any_gang: Collection[str] = (),
) -> None:
    """Check a plan against the graph it is to carry out.

    Args:
        plan: the plan.
        graph: the graph.
        num_items: source items of a step.
        isolated: workers that must stand on lanes reserved for them, but for an eager run.
        layouts: those that workers declare, as far as the caller knows; the layouts of other
            workers are not checked.
        any_gang: workers whose gangs may have any number of lanes in the layout ONE_LANE.

    Raises:
        PlanError: the first thing that does not fit.
    """
    _check_lanes(plan.lanes)
    lane_ids = {lane.id for lane in plan.lanes}
    workers = placed(graph)
    for worker in workers:
        if worker not in plan.placements:
            raise PlanError("has no placement in the plan", key=f"placements.{worker}")
    for worker, placement in plan.placements.items():
        _check_known("placements", worker, workers)
        _check_placement(worker, placement, lane_ids)
        for name in ("state_bytes", "working_bytes"):
            if (size := getattr(placement, name)) < 0:
                key = f"placements.{worker}.{name}"
                raise PlanError("must not be negative", key=key, value=size)
        if worker in layouts:
            _check_layout(worker, placement, layouts[worker])
            if worker not in any_gang:
                _check_gang_sizes(worker, placement, layouts[worker])
    for edge in graph.weight_edges:
        if edge.source not in graph.workers:
            raise PlanError(
                f"publishes its weights to {edge.target}, but no stage of the step runs on it, so "
                "they never change",
                key=edge.source,
                hint="take it out of `sync`",
            )
    _check_reserved(plan, isolated)
    check_memory(plan, graph)
    names = [node.name for node in graph.nodes]
    for name, stage in plan.stages.items():
        _check_known("stages", name, names)
        _check_positive(f"stages.{name}.chunk", stage.chunk)
        _check_positive(f"stages.{name}.max_running", stage.max_running)
    for name in plan.order:
        _check_known("order", name, names)
    for node in graph.nodes:
        _check_gang(node, plan.placements[node.worker])
    check_items(graph, num_items)
    _check_edges(plan, graph, num_items)
    if plan.max_staleness < 0:
        raise PlanError("must not be negative", key="max_staleness", value=plan.max_staleness)
    predicted = plan.predicted_seconds
    if predicted is not None and not 0 < predicted < inf:
        raise PlanError("must be positive and finite", key="predicted_seconds", value=predicted)
    deadline = plan.deadline_seconds
    if not isinstance(deadline, int | float) or not deadline > 0:  # true of a NaN as well
        raise PlanError("must be positive", key="deadline_seconds", value=deadline)


def _check_lanes(lanes: tuple[LaneSpec, ...]) -> None:
    if not lanes:
        raise PlanError("a plan needs at least one lane", key="lanes")
    twice = [lane for lane, count in Counter(lane.id for lane in lanes).items() if count > 1]
    if twice:
        raise PlanError("names a lane twice", key="lanes", value=twice[0])
    for lane in lanes:
        if lane.kind not in ("cpu", "gpu", *map(str.lower, DEVICES)):
            raise PlanError(
                "is no kind of lane",
                key="lanes",
                value=lane.kind,
                expected="cpu, gpu or a device's name, such as h100",
            )
        if lane.gpu is not None and lane.gpu < 0:
            raise PlanError(
                f"lane {lane.id} is on an accelerator of a negative number",
                key="lanes",
                value=lane.gpu,
            )
    for node in sorted({lane.node for lane in lanes}):
        if node < 0:
            raise PlanError("is on a machine of a negative number", key="lanes", value=node)
        _check_shared([lane for lane in lanes if lane.node == node])


def _check_shared(lanes: Sequence[LaneSpec]) -> None:
    """Lanes of one machine may share a core or an accelerator if all but one are reserved."""
    free = [lane for lane in lanes if lane.reserved_for is None]
    owners: dict[tuple[str, int], list[int]] = {}
    for lane in free:
        held = [("core", core) for core in sorted(set(lane.cores))]
        held += [("gpu", lane.gpu)] if lane.gpu is not None else []
        for one in held:
            owners.setdefault(one, []).append(lane.id)
    for (what, number), ids in owners.items():
        if len(ids) > 1:
            raise PlanError(f"lanes {ids} overlap on {what} {number}", key="lanes")


def _check_reserved(plan: Plan, isolated: Collection[str]) -> None:
    """A reserved lane is its worker's alone, and an isolated worker has no other."""
    reserved = {lane.id: lane.reserved_for for lane in plan.lanes}
    for lane, owner in reserved.items():
        if owner is not None and owner not in plan.placements:
            raise PlanError(
                f"lane {lane} is reserved for a worker with no placement",
                key="lanes",
                value=owner,
                hint=suggestion(owner, plan.placements),
            )
    for worker, spot in plan.placements.items():
        for lane in spot.lanes:
            if reserved[lane] not in (None, worker):
                raise PlanError(
                    f"stands on lane {lane}, which is reserved for {reserved[lane]}",
                    key=f"placements.{worker}",
                )
            if worker in isolated and reserved[lane] is None and plan.mode != "eager":
                raise PlanError(
                    f"must have a process of its own, and lane {lane} is not reserved for it",
                    key=f"placements.{worker}",
                    hint=f'add a lane with "reserved_for": "{worker}", and place it there',
                )


def _check_known(key: str, name: str, valid: Sequence[str]) -> None:
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


def _check_layout(worker: str, placement: Placement, declared: Collection[Layout]) -> None:
    key, name = f"placements.{worker}.layout", placement.layout
    layout = next((one for one in declared if one.name == name), None)
    names = [one.name for one in declared if one.obstacle() is None]
    if layout is None:
        raise PlanError(
            "is no layout of the worker", key=key, value=name, hint=suggestion(name, names)
        )
    if (obstacle := layout.obstacle()) is not None:
        raise PlanError(obstacle, key=key, value=name, expected=f"one of {', '.join(names)}")
    sizes = {len(gang) for gang in placement.replicas}
    if layout.name != ONE_LANE.name and sizes != {layout.lanes}:
        raise PlanError(
            f"is a layout of {layout.lanes} lanes",
            key=f"placements.{worker}.replicas",
            value=placement.replicas,
            expected=f"{layout.lanes} lanes in each replica, or another layout",
        )


def _check_gang_sizes(worker: str, placement: Placement, declared: Collection[Layout]) -> None:
    """Refuse gangs of so many lanes as no layout has that the worker can have."""
    possible = {one.lanes for one in declared if one.obstacle() is None}
    for size in sorted({len(gang) for gang in placement.replicas} - possible):
        obstacles = (one.obstacle() for one in declared if one.lanes == size)
        lanes = " or ".join(map(str, sorted(possible)))
        raise PlanError(
            next(obstacles, None) or f"the worker has no layout of {size} lanes",
            key=f"placements.{worker}.replicas",
            value=placement.replicas,
            expected=f"replicas of {lanes} lane{'' if possible == {1} else 's'}",
        )


def check_equal_gangs(node: StageNode, placement: Placement) -> None:
    """Refuse replicas of different sizes, whose lanes could not sum over each other."""
    if len({len(gang) for gang in placement.replicas}) > 1 and not node.is_function:
        raise PlanError(
            "stands on gangs of unequal size, which could not sum over their lanes",
            key=f"placements.{node.worker}",
            value=placement.replicas,
        )


def check_executable(plan: Plan) -> None:
    """Refuse what a plan may say that is only priced, and not one that is run.

    Raises:
        PlanError: a lane's kind and its accelerator contradict each other, or no timer holds the
            deadline.
    """
    for lane in plan.lanes:
        if (lane.kind == "cpu") != (lane.gpu is None):
            named = "no accelerator" if lane.gpu is None else f"accelerator {lane.gpu}"
            raise PlanError(
                f"lane {lane.id} of kind {lane.kind} names {named}",
                key="lanes",
                expected='"gpu", its number, for a lane of an accelerator, and for no other',
            )
    if plan.deadline_seconds > LONGEST_DEADLINE:
        raise PlanError(
            "is too long",
            key="deadline_seconds",
            value=plan.deadline_seconds,
            expected=f"at most {LONGEST_DEADLINE:,.0f} seconds",
        )


def _check_gang(node: StageNode, placement: Placement) -> None:
    if all(len(gang) == 1 for gang in placement.replicas):
        return
    why = "is sticky" if node.sticky else ""
    if node.streaming and node.is_function:
        why = "is a streaming function, whose lanes could not agree on what has come"
    if why:
        raise PlanError(
            f"{why}, so each of its replicas must be a single lane",
            key=f"placements.{node.worker}",
        )


def _check_edges(plan: Plan, graph: FlowGraph, num_items: int) -> None:
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
    whole = whole_step_edges(graph, limits, num_items)
    for name, edge in plan.edges.items():
        producer, consumer = known[name]
        needed = _room_needed(graph, producer, consumer, num_items)
        if (producer, consumer) in whole:
            needed = num_items * graph.nodes[consumer].fanout
        if edge.max_items is not None and edge.max_items < needed:
            raise PlanError(
                "is less than the stages behind it need at once",
                key=f"edges.{name}.max_items",
                value=edge.max_items,
                expected=f"at least {needed}",
            )


def _room_needed(graph: FlowGraph, producer: int, consumer: int, num_items: int) -> int:
    """Return how many items an edge must hold lest the stages after it wait for ever."""
    maker = graph.nodes[producer]
    made_at_once = maker.unit_items(num_items * maker.fanout) * maker.expands
    behind = [graph.nodes[stage] for stage in graph.between(producer, consumer)]
    return max(made_at_once, *(node.unit_items(num_items * node.fanout) for node in behind))
