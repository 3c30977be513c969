"""The profile of a recipe on its lanes: from the store, or measured now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from m2flow.engine.plan import LaneSpec
from m2flow.plan.profile import Profile
from m2flow.runtime.profiling import cached, stored_at
from m2flow.runtime.profiling.stored import cache_folder
from m2flow.workloads.common.planning import flow_of, lanes_of
from m2flow.workloads.common.profile_key import Key, profile_key
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import workload_of
from m2flow.workloads.common.workload import Experiment, Progress

LEAST_SECONDS = 15.0
"""What is left for measuring when all else has used a budget up."""

SAMPLED_STEPS = 8
"""The items of so many steps are measured, again and again."""


@dataclass(frozen=True)
class Obtained:
    """A profile, and in a few words where it comes from."""

    profile: Profile
    origin: str


def profile_of(
    recipe: Recipe,
    progress: Progress,
    *,
    budget: float | None = None,
    again: bool = False,
) -> Obtained:
    """A recipe's profile on its lanes: from the store, or measured now.

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
    least = LEAST_SECONDS if budget is None else 0.0
    budget = recipe.profiling_seconds if budget is None else budget
    if not again and (known := cached(key)) is not None:
        return Obtained(known, f"stored at {stored_at(key)}; --again measures again")
    return _measured(recipe, lanes, key, budget, least, progress)


def sampled_steps(recipe: Recipe) -> range:
    """Steps whose items are measured."""
    return range(min(SAMPLED_STEPS, recipe.steps))


def _measured(
    recipe: Recipe,
    lanes: Sequence[LaneSpec],
    key: Key,
    budget: float,
    least: float,
    progress: Progress,
) -> Obtained:
    started = time.monotonic()
    from m2flow.runtime.driver.ahead import LanesAhead

    workload = workload_of(recipe)
    with LanesAhead(_with_reserved(recipe, lanes), workload.modules) as ahead:
        from m2flow.runtime.profiling import obtain, profile_flow

        experiment = workload.experiment(recipe)
        _prepare(experiment, progress)
        found, origin = obtain(
            key,
            lambda: profile_flow(
                experiment.flow,
                [experiment.batch(step) for step in sampled_steps(recipe)],
                lanes=ahead.pool(),
                budget_seconds=max(least, budget - (time.monotonic() - started)),
                key=key,
                note=progress.note,
            ),
            again=True,
        )
    return Obtained(found, origin)


def _with_reserved(recipe: Recipe, lanes: Sequence[LaneSpec]) -> Sequence[LaneSpec]:
    """The lanes, with those of their own for workers that need them."""
    from m2flow.plan import isolated_workers
    from m2flow.plan.profile.trials import trial_plans

    flow = flow_of(recipe)
    isolated = isolated_workers(flow)
    return trial_plans(flow.trace(), lanes, recipe.items_per_step, isolated=isolated)[0].lanes


def _prepare(experiment: Experiment, progress: Progress) -> None:
    """Make the starting model; it is kept for the next time."""
    if experiment.makes_model:
        name = workload_of(experiment.recipe).model_name(experiment.recipe)
        experiment.prepare(cache_folder() / "models" / name, progress)
