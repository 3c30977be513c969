"""From an experiment to a run on lanes: the one place that knows `launch` and the pilot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.flow.graph import FlowGraph
from m2flow.observe.run_directory import RunDirectory
from m2flow.plan import with_sizes
from m2flow.plan.choose.judge import sized
from m2flow.plan.explain import Explanation, explained
from m2flow.plan.file import to_json
from m2flow.plan.profile import Profile
from m2flow.plan.race import tried
from m2flow.runtime.driver.auto import GUESSES, Auto
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.profiling.stored import cached, stored_at, try_to_keep
from m2flow.workloads.common.computed import (
    cluster_of,
    computed_profile,
    lanes_named,
    whose_figures,
)
from m2flow.workloads.common.planning import layouts_of
from m2flow.workloads.common.profile_key import Key, gpu_name, profile_key
from m2flow.workloads.common.recipe import AUTO_MODE, Recipe
from m2flow.workloads.common.workload import Experiment, RunProgress

if TYPE_CHECKING:
    from m2flow.runtime.driver.pilot import Pilot
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.run import Run


def launched(
    experiment: Experiment,
    plan: Plan | None,
    pool: LanePool | None,
    progress: RunProgress,
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
    recipe, flow = experiment.recipe, experiment.flow(checkpoint)
    start = partial(
        launch,
        flow,
        items_per_step=recipe.items_per_step,
        lanes="auto" if pool is None else pool,
        first_step=first_step,
        also=also,
        load_deadline_seconds=recipe.load_deadline_seconds,
        lane_restarts=recipe.lane_restarts,
        snapshot_every=recipe.snapshot_every,
        elastic=recipe.elastic,
    )
    if plan is not None:
        return start(plan=with_working_memory(recipe, flow.trace(), plan))
    assert pool is not None, "a plan is chosen for lanes"
    free = [lane for lane in pool.lanes if lane.reserved_for is None]
    key = profile_key(recipe, free)
    known = cached(key, flow.trace())
    if known is not None:
        progress.note(f"profile: stored at {stored_at(key)}")
    elif (known := _computed(recipe, flow.trace(), free)) is not None:
        progress.note(f"profile: computed {whose_figures(gpu_name(free))}; the run learns")
    else:
        progress.note(
            f"no profile of these lanes is stored: the run begins {GUESSES[0]}, and learns"
        )
    refused = set[str]()

    def keep(profile: Profile) -> None:
        why = try_to_keep(replace(profile, key=key))
        if why is not None and why not in refused:
            refused.add(why)
            progress.note(f"what the run learns is not stored for later runs: {why}")

    return start(
        mode=AUTO_MODE,
        layouts=layouts_of(recipe, flow, free),
        auto=Auto(
            profile=known,
            max_staleness=recipe.max_staleness,
            num_steps=recipe.steps,
            deadline_seconds=recipe.deadline_seconds,
            keep=keep,
        ),
    )


def with_working_memory(recipe: Recipe, graph: FlowGraph, plan: Plan) -> Plan:
    """Return the plan with the working memory of calls on accelerators with a limit, where the
    plan does not say it.

    Without it states alone would count against the limit. Computed, where that can be.
    """
    unsaid = {name for name, spot in plan.placements.items() if not spot.working_bytes}
    if not unsaid or any(lane.gpu is None or lane.memory_bytes is None for lane in plan.lanes):
        return plan
    profile = _computed(recipe, graph, plan.lanes)
    if profile is None:
        return plan
    named = lanes_named(plan, cluster_of(plan.lanes, gpu_name(plan.lanes)))
    spots = sized(named, graph, profile, recipe.items_per_step).placements
    return with_sizes(plan, {}, {name: spots[name].working_bytes for name in unsaid})


def _computed(recipe: Recipe, graph: FlowGraph, lanes: Sequence[LaneSpec]) -> Profile | None:
    """A profile from data sheets; None where nothing can be computed."""
    if any(lane.gpu is None for lane in lanes):
        return None
    return computed_profile(recipe, graph, lanes, gpu_name(lanes))


def write_decision(directory: RunDirectory, graph: FlowGraph, pilot: Pilot, key: Key) -> None:
    """Write the profile, what was decided by it, and how the plans did that were tried.

    Args:
        directory, graph, pilot: of the run.
        key: of its profile, as `profile_key` has it.
    """
    if pilot.profile is not None:
        directory.write_json(directory.profile, to_json(replace(pilot.profile, key=key)))
    if pilot.decision is not None:
        directory.write_json(directory.decision, to_json(explanation(pilot, graph)))


def explanation(pilot: Pilot, graph: FlowGraph) -> Explanation:
    """Explain the pilot's last decision, with the race that followed."""
    assert pilot.decision is not None
    race = () if pilot.race is None else tried(pilot.race.entrants)
    return explained(pilot.decision, graph, race=race)
