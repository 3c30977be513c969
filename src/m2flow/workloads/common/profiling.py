"""The profile of a recipe on its lanes: from the store, or measured now."""

from __future__ import annotations

import time
from collections.abc import Sequence

from m2flow.engine.plan import LaneSpec
from m2flow.errors import writing
from m2flow.plan import isolated_workers
from m2flow.plan.profile import Profile
from m2flow.plan.profile.trials import trial_plans
from m2flow.runtime.profiling import cached, stored_at, try_to_keep
from m2flow.runtime.profiling.stored import cache_folder
from m2flow.workloads.common.planning import flow_of, lanes_of
from m2flow.workloads.common.profile_key import profile_key
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import workload_of
from m2flow.workloads.common.workload import RunProgress

LEAST_SECONDS = 15.0
"""What is left for measuring when all else has used a budget up."""

SAMPLED_STEPS = 8
"""The items of so many steps are measured, again and again."""


def profile_of(
    recipe: Recipe, progress: RunProgress, *, budget: float | None = None, again: bool = False
) -> tuple[Profile, str]:
    """A recipe's profile on its lanes, and in a few words where it comes from.

    Args:
        recipe: what is to be profiled.
        progress: told what is going on.
        budget: seconds that all of it may take.
        again: measure even if a profile is stored.

    Raises:
        UserError: the lanes or the recipe are wrong.
        RunFailed: a step failed.
    """
    lanes = lanes_of(recipe)
    key = profile_key(recipe, lanes)
    if not again and (known := cached(key, flow_of(recipe).trace())) is not None:
        return known, f"stored at {stored_at(key)}; --again measures again"
    least = LEAST_SECONDS if budget is None else 0.0
    budget = recipe.profiling_seconds if budget is None else budget
    started = time.monotonic()
    from m2flow.runtime.driver.ahead import LanesAhead
    from m2flow.runtime.profiling import profile_flow

    workload = workload_of(recipe)
    workload.check_here(recipe)
    hosts, seconds = _with_reserved(recipe, lanes), recipe.load_deadline_seconds
    with LanesAhead(hosts, workload.modules, start_seconds=seconds) as ahead:
        ahead.may_import()
        experiment = workload.experiment(recipe)
        if experiment.makes_model:  # it is kept for the next time
            folder = cache_folder() / "models" / workload.model_name(recipe)
            with writing("the starting model", folder):
                experiment.prepare(folder, progress)
        pool = ahead.pool()
        key = profile_key(recipe, [lane for lane in pool.lanes if lane.reserved_for is None])
        profile = profile_flow(
            experiment.flow,
            [experiment.batch(step) for step in range(min(SAMPLED_STEPS, recipe.steps))],
            lanes=pool,
            budget_seconds=max(least, budget - (time.monotonic() - started)),
            key=key,
            note=progress.note,
        )
    refused = try_to_keep(profile)
    kept = f"stored at {stored_at(key)}" if refused is None else f"not stored: {refused}"
    return profile, f"measured, {kept}"


def _with_reserved(recipe: Recipe, lanes: Sequence[LaneSpec]) -> Sequence[LaneSpec]:
    """The lanes, with those of their own for workers that need them."""
    flow = flow_of(recipe)
    isolated = isolated_workers(flow)
    return trial_plans(flow.trace(), lanes, recipe.items_per_step, isolated=isolated)[0].lanes
