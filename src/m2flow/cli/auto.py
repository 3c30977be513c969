"""A recipe under the best plan: its profile, the choice, and the files that say why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from m2flow.cli.planning import layouts_of
from m2flow.cli.profile import measuring_budget
from m2flow.cli.profile_key import profile_key
from m2flow.plan.explain import explained, summary
from m2flow.plan.file import to_json
from m2flow.runtime.driver.auto import Auto
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.profiling import obtain, profile_flow
from m2flow.workloads.reasoning.flow import recipe_flow

if TYPE_CHECKING:
    from m2flow.flow import Flow
    from m2flow.flow.graph import FlowGraph
    from m2flow.observe.progress import TrainProgress
    from m2flow.observe.run_directory import RunDirectory
    from m2flow.plan.prediction import Decision
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.run import Run
    from m2flow.workloads.reasoning.experiment import ReasoningExperiment
    from m2flow.workloads.reasoning.workers import ModelSource

SAMPLED_STEPS = 8
"""The prompts of so many steps are measured, again and again."""


def launch_auto(
    experiment: ReasoningExperiment,
    flow: Flow,
    model: ModelSource,
    pool: LanePool,
    *,
    first_step: int,
    also: Mapping[str, int],
    progress: TrainProgress,
) -> Run:
    """The flow under the plan that is predicted to be the best one for these lanes.

    Args:
        experiment: the recipe and its data.
        flow: to be trained.
        model: what it began with, on copies of which the stages are measured.
        pool: the lanes.
        first_step, also: as for `launch`.
        progress: told what is going on.
    """
    recipe = experiment.recipe
    free = [lane for lane in pool.lanes if lane.reserved_for is None]
    sampled = range(min(SAMPLED_STEPS, recipe.steps))
    key = profile_key(recipe, free)
    profile, origin = obtain(
        key,
        lambda: profile_flow(
            lambda: recipe_flow(recipe, model, experiment.task),
            [experiment.batch(step, model) for step in sampled],
            lanes=pool,
            budget_seconds=measuring_budget(recipe),
            key=key,
            note=progress.note,
        ),
    )
    progress.note(f"profile: {origin}")
    run = launch(
        flow,
        items_per_step=recipe.prompts_per_step,
        mode="auto",
        lanes=pool,
        first_step=first_step,
        also=also,
        layouts=layouts_of(recipe, flow.trace()),
        auto=Auto(
            profile=profile,
            max_staleness=recipe.max_staleness,
            num_steps=recipe.steps,
            deadline_seconds=recipe.deadline_seconds,
        ),
    )
    assert run.pilot is not None
    for line in summary(explained(run.pilot.decision, run.graph)):
        progress.note(line)
    return run


def write_decision(directory: RunDirectory, graph: FlowGraph, decision: Decision) -> None:
    """Write the profile, and what was decided by it."""
    directory.write_profile(to_json(decision.profile))
    directory.write_decision(to_json(explained(decision, graph)))
