"""From a recipe to its graph and plan, without torch, Ray or any data."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from m2flow.engine.plan import Plan
from m2flow.errors import PlanError
from m2flow.flow.graph import FlowGraph
from m2flow.plan import build_plan, check_machine, parse_lanes, read_plan, validate
from m2flow.reasoning.config import ReasoningRecipe
from m2flow.reasoning.flow import grpo_flow
from m2flow.reasoning.workers import ModelSource


def graph_of(recipe: ReasoningRecipe) -> FlowGraph:
    """The macro flow of a recipe, traced with workers that will never be loaded."""
    return grpo_flow(recipe, ModelSource(""), None).trace()


def planned(recipe: ReasoningRecipe, plan_file: Path | None = None) -> tuple[FlowGraph, Plan]:
    """The graph and the plan that a recipe leads to on this machine.

    Raises:
        UserError: the lanes, the mode or the plan file are wrong.
    """
    graph = graph_of(recipe)
    if plan_file is not None:
        plan = read_plan(plan_file)
    else:
        lanes = parse_lanes(recipe.lanes)
        plan = build_plan(recipe.mode, graph, lanes, recipe.prompts_per_step)
        plan = replace(
            plan, max_staleness=recipe.max_staleness, deadline_seconds=recipe.deadline_seconds
        )
    validate(plan, graph, recipe.prompts_per_step)
    return graph, plan


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
