"""From a recipe to its graph, lanes, layouts and plan, without torch, Ray or any data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import PlanError, UserError, suggestion
from m2flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Layout, declares_layouts
from m2flow.plan import (
    build_plan,
    check_machine,
    isolated_workers,
    parse_bytes,
    parse_lanes,
    read_plan,
    validate,
    with_memory,
)
from m2flow.plan.profile.clusters import Cluster
from m2flow.plan.profile.hardware import USABLE_MEMORY
from m2flow.plan.validate import check_equal_gangs, check_executable
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import workload_of


def flow_of(recipe: Recipe, model: str | None = None) -> Flow:
    """The macro flow of a recipe, with workers that will never be loaded.

    Raises:
        UserError: its workers cannot run the recipe's model.
    """
    return workload_of(recipe).flow(recipe, model)


def planned(recipe: Recipe, plan_file: Path | None = None) -> tuple[FlowGraph, Plan]:
    """The graph and the plan that a recipe leads to on this machine.

    Raises:
        UserError: the lanes, the layouts, the mode or the plan file are wrong.
    """
    flow = flow_of(recipe)
    graph, isolated = flow.trace(), isolated_workers(flow)
    if plan_file is not None:
        plan = read_plan(plan_file)
        if not recipe.allows_staleness(plan.max_staleness):
            raise PlanError(
                "the recipe's problems, or the age of its tokens, follow from how far generation "
                "runs ahead",
                key="max_staleness",
                value=plan.max_staleness,
                expected=f"at most {recipe.max_staleness}, which the recipe says",
                hint=f"set max_staleness: {plan.max_staleness} in the recipe too",
            )
    else:
        lanes = lanes_of(recipe)
        layouts = layouts_of(recipe, flow, lanes)
        plan = replace(
            build_plan(recipe.mode, graph, lanes, recipe.items_per_step, isolated, layouts),
            max_staleness=recipe.max_staleness,
            deadline_seconds=recipe.deadline_seconds,
        )
    check_plan(plan, flow, graph, recipe.items_per_step)
    check_executable(plan)
    for node in graph.nodes:
        check_equal_gangs(node, plan.placements[node.worker])
    return graph, plan


def check_plan(plan: Plan, flow: Flow, graph: FlowGraph, num_items: int) -> None:
    """Check a plan against a flow and the layouts that its workers declare.

    Args:
        plan: the plan.
        flow, graph: the flow, and its step.
        num_items: source items of a step.

    Raises:
        PlanError: the first thing that does not fit.
    """
    workers = flow.workers.items()
    any_gang = {name for name, worker in workers if not declares_layouts(worker)}
    layouts = declared_layouts(flow, plan.lanes)
    validate(plan, graph, num_items, isolated_workers(flow), layouts, any_gang)


def lanes_of(recipe: Recipe) -> tuple[LaneSpec, ...]:
    """The lanes that a recipe asks for, with their limit of memory.

    Raises:
        UserError: they do not parse, or this machine does not have them.
    """
    return with_limit(parse_lanes(recipe.lanes), recipe)


def with_limit(lanes: tuple[LaneSpec, ...], recipe: Recipe) -> tuple[LaneSpec, ...]:
    """The lanes under the recipe's limit of memory, if it has one."""
    if recipe.lane_memory is None:
        return lanes
    return with_memory(lanes, parse_bytes(recipe.lane_memory, "lane_memory"))


def under_limit(cluster: Cluster, recipe: Recipe) -> Cluster:
    """The cluster whose devices have no more memory than the recipe's limit lets states and calls
    use of them: an engine takes its share of what it may have.
    """
    if recipe.lane_memory is None:
        return cluster
    most = round(parse_bytes(recipe.lane_memory, "lane_memory") / USABLE_MEMORY)
    machines = (
        replace(part, device=replace(part.device, memory_bytes=min(part.device.memory_bytes, most)))
        for part in cluster.machines
    )
    return Cluster(tuple(machines))


def declared_layouts(flow: Flow, lanes: Sequence[LaneSpec]) -> dict[str, list[Layout]]:
    """The layouts that a flow's workers declare for lanes, those with an obstacle too."""
    kinds = sorted({lane.kind for lane in lanes})
    return {
        name: [layout for kind in kinds for layout in worker.layouts(kind, len(lanes))]
        for name, worker in flow.workers.items()
    }


def layouts_of(recipe: Recipe, flow: Flow, lanes: Sequence[LaneSpec]) -> dict[str, Layout]:
    """Layouts that the recipe asks for, by worker; see `named_layouts`."""
    everywhere = recipe.mode == "collocated"
    return named_layouts(recipe.layouts, flow, lanes, everywhere=everywhere)


def named_layouts(
    names: Mapping[str, str],
    flow: Flow,
    lanes: Sequence[LaneSpec],
    *,
    everywhere: bool,
    option: str = "layouts.{}",
) -> dict[str, Layout]:
    """Layouts by worker.

    Args:
        names: of the layouts, by worker.
        flow: whose workers declare which layouts they know.
        lanes: where the workers may stand.
        everywhere: whether each worker stands on all lanes, as under `collocated`.
        option: what a worker's layout is called where the user names it.

    Raises:
        UserError: the flow has no such worker, the worker knows no such layout on these lanes,
            something that the layout divides cannot be divided so, or lanes that it is to stand
            on do not divide into such replicas.
    """
    found, declared = {}, declared_layouts(flow, lanes)
    free = sum(lane.reserved_for is None for lane in lanes)
    for worker, name in names.items():
        key = option.format(worker)
        if worker not in flow.workers:
            raise UserError("is no worker", key=key, hint=suggestion(worker, flow.workers))
        known = {layout.name: layout for layout in declared[worker]}
        possible = [one for one in known.values() if one.obstacle() is None]
        fitting = [one for one in possible if free % one.lanes == 0]
        if name not in known:
            problem = f"{worker} has no such layout on {free} lane{'s' if free > 1 else ''}"
        elif (obstacle := known[name].obstacle()) is not None:
            problem = obstacle
            fitting = [one for one in possible if one.lanes == known[name].lanes] or possible
        elif everywhere and known[name] not in fitting:
            problem = f"{worker}'s {free} lanes do not divide into replicas of {known[name].lanes}"
        else:
            found[worker] = known[name]
            continue
        expected = ", ".join(one.name for one in fitting)
        raise UserError(problem, key=key, value=name, expected=f"one of {expected}")
    return found


def check_build(lanes: Sequence[LaneSpec]) -> None:
    """Refuse accelerators of this machine where torch is built for CPUs alone.

    Raises:
        UserError: says what to install, or to ask for.
    """
    if all(lane.gpu is None for lane in lanes) or os.environ.get("RAY_ADDRESS"):
        return
    if metadata.version("torch").endswith("+cpu"):
        raise UserError(
            "torch is built for CPUs alone, and this machine's accelerators are to be used",
            key="lanes",
            value=f"gpu:{sum(lane.gpu is not None for lane in lanes)}",
            hint="install torch for CUDA, or set lanes to cpu:N",
        )


def check_runnable(plan: Plan) -> None:
    """Refuse a plan that this machine cannot carry out: it may have been made for another one.

    With `RAY_ADDRESS` the lanes are the cluster's, and Ray knows better.

    Raises:
        PlanError: a core or an accelerator is not here, or an eager plan splits a worker.
    """
    for worker, placement in plan.placements.items():
        if plan.mode == "eager" and len(placement.lanes) > 1:
            raise PlanError(
                "an eager run has one process, which holds one copy of a worker",
                key=f"placements.{worker}",
                value=placement.replicas,
                hint="place it on one lane, or give the plan another mode",
            )
    if not os.environ.get("RAY_ADDRESS"):
        check_machine(plan)
