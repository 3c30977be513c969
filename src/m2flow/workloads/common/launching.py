"""From an experiment to a run on lanes: the one place that knows `launch` and the pilot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from m2flow.engine.plan import Plan
from m2flow.flow.graph import FlowGraph
from m2flow.observe.run_directory import RunDirectory
from m2flow.plan.explain import explained, summary
from m2flow.plan.file import to_json
from m2flow.plan.prediction import Decision
from m2flow.runtime.driver.auto import Auto
from m2flow.runtime.driver.launch import launch
from m2flow.workloads.common.planning import layouts_of
from m2flow.workloads.common.profiling import profile_on
from m2flow.workloads.common.recipe import AUTO_MODE
from m2flow.workloads.common.workload import Experiment, Progress

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.run import Run


def launched(
    experiment: Experiment,
    plan: Plan | None,
    pool: LanePool | None,
    progress: Progress,
    *,
    checkpoint: Path | None,
    first_step: int,
    also: Mapping[str, int],
) -> Run:
    """The experiment's flow on its lanes, under a plan that is given or the best one.

    Args:
        experiment: what is to be run, prepared.
        plan: how; None for the one that is predicted to be the best.
        pool: where; None for in this process.
        progress: told what is going on.
        checkpoint: the workers go on from here.
        first_step, also: as for `launch`.
    """
    flow, items = experiment.flow(checkpoint), experiment.recipe.items_per_step
    if plan is not None:
        lanes = "auto" if pool is None else pool
        return launch(
            flow, items_per_step=items, plan=plan, lanes=lanes, first_step=first_step, also=also
        )
    assert pool is not None, "a plan is chosen for lanes"
    recipe = experiment.recipe
    free = [lane for lane in pool.lanes if lane.reserved_for is None]
    profile, origin = profile_on(pool, experiment, progress, recipe.profiling_seconds)
    progress.note(f"profile: {origin}")
    run = launch(
        flow,
        items_per_step=items,
        mode=AUTO_MODE,
        lanes=pool,
        first_step=first_step,
        also=also,
        layouts=layouts_of(recipe, flow, free),
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
