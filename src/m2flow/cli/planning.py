"""From a recipe to its graph and plan, without torch, Ray or any data."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import PlanError, UserError
from m2flow.flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Layout
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
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.workers import ModelSource

AUTO_MODE = "auto"
"""The mode in which the plan is searched for."""

LEARNER = "learner"

GANG_KEYS = {
    LEARNER: "training.gang",
    "critic": "training.gang",
    "generator": "generation.gang",
}
"""Workers to the key that says how many lanes take part in each of their calls."""


def flow_of(recipe: ReasoningRecipe) -> Flow:
    """The macro flow of a recipe, with workers that will never be loaded."""
    return recipe_flow(recipe, ModelSource(""), None)


def graph_of(recipe: ReasoningRecipe) -> FlowGraph:
    """The same, traced."""
    return flow_of(recipe).trace()


def planned(recipe: ReasoningRecipe, plan_file: Path | None = None) -> tuple[FlowGraph, Plan]:
    """The graph and the plan that a recipe leads to on this machine.

    Raises:
        UserError: the lanes, the mode or the plan file are wrong.
    """
    flow = flow_of(recipe)
    graph, isolated = flow.trace(), isolated_workers(flow)
    if plan_file is not None:
        plan = read_plan(plan_file)
    else:
        plan = replace(
            _built(recipe, graph, isolated),
            max_staleness=recipe.max_staleness,
            deadline_seconds=recipe.deadline_seconds,
        )
    validate(plan, graph, recipe.prompts_per_step, isolated)
    return graph, plan


def lanes_of(recipe: ReasoningRecipe) -> tuple[LaneSpec, ...]:
    """The lanes that a recipe asks for, with their limit of memory.

    Raises:
        UserError: they do not parse, or this machine does not have them.
    """
    lanes = parse_lanes(recipe.lanes)
    if recipe.lane_memory is None:
        return lanes
    return with_memory(lanes, parse_bytes(recipe.lane_memory, "lane_memory"))


def layouts_of(recipe: ReasoningRecipe, graph: FlowGraph) -> dict[str, Layout]:
    """The layout of each worker's replicas, as the recipe asks for it."""
    asked = {"training.gang": recipe.training.gang, "generation.gang": recipe.generation.gang}
    found = {}
    for name, key in GANG_KEYS.items():
        if name in graph.workers and asked[key] > 1:
            sort = "tp" if key == "generation.gang" else "fsdp"
            found[name] = Layout(f"{sort}{asked[key]}", asked[key])
    return found


def _built(recipe: ReasoningRecipe, graph: FlowGraph, isolated: Collection[str]) -> Plan:
    """The plan of the recipe's mode, on the recipe's lanes."""
    lanes = lanes_of(recipe)
    layouts = layouts_of(recipe, graph)
    try:
        return build_plan(recipe.mode, graph, lanes, recipe.prompts_per_step, isolated, layouts)
    except UserError as error:
        key = str(error.key)
        own = GANG_KEYS.get(key.removeprefix("layouts."))
        if own is None:
            raise
        raise UserError(str(error).removeprefix(f"{key}: "), key=own) from None


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
