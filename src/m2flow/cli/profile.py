"""`m2flow profile`: how long the stages of a recipe take here, as a table and as a file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from m2flow.cli.planning import flow_of, lanes_of
from m2flow.cli.profile_key import Key, model_folder_name, profile_key
from m2flow.cli.recipe import read_recipe
from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.progress import TrainProgress
from m2flow.plan.file import to_json
from m2flow.plan.profile import Profile, Quantiles, StageCost
from m2flow.plan.sizes import bytes_text
from m2flow.runtime.profiling import cached, stored_at
from m2flow.runtime.profiling.stored import cache_folder, given
from m2flow.workloads.reasoning.config import ReasoningRecipe

if TYPE_CHECKING:
    from m2flow.workloads.reasoning.experiment import ReasoningExperiment
    from m2flow.workloads.reasoning.workers import ModelSource

SMALL_BUDGET, BUDGET = 60.0, 300.0
"""Seconds for a model that is made on the spot, and for any other."""

LEAST_SECONDS = 15.0
"""What is left for measuring when all else has used a budget of these up."""

STEPS = 8
"""So many steps' prompts are measured, again and again."""

SHOWN_SIZES = 4


@dataclass(frozen=True)
class Obtained:
    """A profile, and in a few words where it comes from."""

    profile: Profile
    origin: str


def profile(
    recipe_path: Path,
    overrides: Sequence[str] = (),
    *,
    budget: float | None = None,
    out: Path | None = None,
    again: bool = False,
) -> None:
    """Print a recipe's profile, and write it to a file.

    Args:
        recipe_path: the YAML file.
        overrides: `key=value`.
        budget: seconds that all of it may take; by default SMALL_BUDGET or BUDGET.
        out: the file; by default only the store has it.
        again: measure even if a profile is stored.

    Raises:
        UserError: the input is wrong.
        RunFailed: a step failed.
    """
    if budget is not None and not budget > 0:
        raise UserError("must be positive", key="--budget", value=budget)
    recipe = read_recipe(recipe_path, overrides)
    console = Console(highlight=False)
    with TrainProgress(console) as progress:
        progress.start(f"m2flow: profile of {recipe.name}")
        found = profile_of(recipe, budget=budget, again=again, progress=progress)
    console.print(table(found.profile))
    for line in beside(found.profile):
        console.print(line, soft_wrap=True)
    console.print(found.origin, soft_wrap=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_json(found.profile), encoding="utf-8")
        console.print(f"written to {out}", soft_wrap=True)


def profile_of(
    recipe: ReasoningRecipe,
    *,
    budget: float | None = None,
    again: bool = False,
    file: Path | None = None,
    whatever_its_key: bool = False,
    progress: TrainProgress | None = None,
) -> Obtained:
    """A recipe's profile on its lanes: from a file, from the store, or measured now.

    Args:
        recipe: what is to be profiled.
        budget: seconds that all of it may take.
        again: measure even if a profile is stored.
        file: take this one, if it was made for such a recipe on such a machine.
        whatever_its_key: take it whatever it was made for.
        progress: told what is going on.

    Raises:
        UserError: the lanes or the recipe are wrong, or the file was made for something else.
        RunFailed: a step failed.
    """
    lanes = lanes_of(recipe)
    key = profile_key(recipe, lanes)
    if file is not None:
        found = given(file, key, whatever_its_key=whatever_its_key)
        return Obtained(found, f"read from {file}")
    least = LEAST_SECONDS if budget is None else 0.0
    budget = measuring_budget(recipe) if budget is None else budget
    if not again and (known := cached(key)) is not None:
        return Obtained(known, f"stored at {stored_at(key)}; --again measures again")
    return _measured(recipe, lanes, key, budget, least, progress)


def measuring_budget(recipe: ReasoningRecipe) -> float:
    """Seconds that a profile may take, where nobody says it."""
    return SMALL_BUDGET if recipe.model.path is None else BUDGET


def _measured(
    recipe: ReasoningRecipe,
    lanes: Sequence[LaneSpec],
    key: Key,
    budget: float,
    least: float,
    progress: TrainProgress | None,
) -> Obtained:
    started = time.monotonic()
    from m2flow.cli.train import WORKERS_NEED
    from m2flow.runtime.driver.ahead import LanesAhead

    with LanesAhead(_with_reserved(recipe, lanes), WORKERS_NEED) as ahead:
        from m2flow.runtime.profiling import obtain, profile_flow
        from m2flow.workloads.reasoning.experiment import ReasoningExperiment
        from m2flow.workloads.reasoning.flow import recipe_flow

        experiment = ReasoningExperiment(recipe)
        model = starting_model(experiment, progress)
        found, origin = obtain(
            key,
            lambda: profile_flow(
                lambda: recipe_flow(recipe, model, experiment.task),
                [experiment.batch(step, model) for step in range(min(STEPS, recipe.steps))],
                lanes=ahead.pool(),
                budget_seconds=max(least, budget - (time.monotonic() - started)),
                key=key,
                note=None if progress is None else progress.note,
            ),
            again=True,
        )
    return Obtained(found, origin)


def _with_reserved(recipe: ReasoningRecipe, lanes: Sequence[LaneSpec]) -> Sequence[LaneSpec]:
    """The lanes, with those of their own for workers that need them."""
    from m2flow.plan import isolated_workers
    from m2flow.plan.profile.trials import trial_plans

    flow = flow_of(recipe)
    isolated = isolated_workers(flow)
    return trial_plans(flow.trace(), lanes, recipe.prompts_per_step, isolated=isolated)[0].lanes


def starting_model(
    experiment: ReasoningExperiment, progress: TrainProgress | None = None
) -> ModelSource:
    """The model that reinforcement begins with; one that is made here is kept for the next time."""
    from m2flow.workloads.reasoning.workers import ModelSource

    recipe = experiment.recipe
    if not experiment.makes_model:
        assert recipe.model.path is not None
        return ModelSource(recipe.model.path, recipe.model.dtype)
    folder = cache_folder() / "models" / model_folder_name(recipe)
    if (folder / "config.json").is_file():
        return ModelSource(str(folder), recipe.model.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    if progress is not None and recipe.warmup.steps:
        progress.phase("warm-up", recipe.warmup.steps)
    return experiment.prepare(
        folder,
        None if progress is None else lambda at: progress.update(at.step, {"loss": at.loss}),
    )


def table(found: Profile) -> Table:
    """Stages with the seconds and the memory of a call at a few sizes."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    drawn.add_column("stage")
    drawn.add_column("lanes")
    for column in ("items", "seconds", "error", "resident", "peak"):
        drawn.add_column(column, justify="right")
    for name, stage in found.stages.items():
        label = name
        for layout in stage.costs:
            kind = f"{layout.lanes} {layout.kind}"
            for items, took in _shown(layout):
                error = f"± {percent(layout.error)}"
                memory = _memory(found, name, layout, items)
                drawn.add_row(label, kind, number(items), seconds(took), error, *memory)
                label = ""
            for replicas, took in layout.finish.points if layout.finish else ():
                drawn.add_row(label, f"{number(replicas)} x {kind}", "finish", seconds(took), "")
    return drawn


def _memory(found: Profile, stage: str, layout: StageCost, items: float) -> tuple[str, str]:
    """Bytes of the state of a stage's worker on a lane, and with what a call takes beside it."""
    known = found.worker(stage.partition(".")[0], layout.lanes, layout.kind)
    state = known.state_bytes if known else 0
    if layout.working is None:
        return bytes_text(state), ""
    return bytes_text(state), bytes_text(state + layout.working.at(items))


def _shown(layout: StageCost) -> list[tuple[float, float]]:
    """A few points of the curve, the smallest and the largest among them."""
    points = layout.seconds.points
    shown = min(SHOWN_SIZES, len(points))
    picked = {round((len(points) - 1) * n / max(1, shown - 1)) for n in range(shown)}
    return [points[index] for index in sorted(picked)]


def _lengths(lengths: Quantiles) -> str:
    middle, most = lengths.at(0.5), lengths.largest
    return f"mean {number(lengths.mean)}, median {number(middle)}, most {number(most)}"


def beside(found: Profile) -> Iterator[str]:
    """What there is beside the seconds of calls, a line each."""
    for name, stage in found.stages.items():
        facts = [f"{stage.output_bytes:,} bytes an item"] if stage.output_bytes else []
        facts += [f"lengths: {_lengths(stage.lengths)}"] if stage.lengths else []
        facts += [f"turns: {_lengths(stage.turns)}"] if stage.turns else []
        alone = min(layout.alone for layout in stage.costs)
        facts += [f"{percent(1 - alone)} faster while other lanes are idle"] if alone < 1 else []
        if facts:
            yield f"{name}: {'; '.join(facts)}"
    for worker, layouts in found.workers.items():
        for layout in layouts:
            if layout.state_bytes:
                yield (
                    f"{worker} on {layout.lanes} {layout.kind}: {layout.state_bytes:,} bytes, "
                    f"away in {seconds(layout.offload)}, back in {seconds(layout.onload)}"
                )
    for cost in found.publish:
        ends = ("from", cost.source_lanes), ("to", cost.target_lanes)
        gangs = [f"{word} {lanes} lanes" for word, lanes in ends if (lanes or 1) > 1]
        where = ", ".join([cost.place, *gangs])
        yield f"{cost.source} => {cost.target} ({where}): {seconds(cost.seconds)}"
    for place, link in found.links.items():
        yield f"link ({place}): {seconds(link.latency)} and {number(link.rate)} bytes/s"
    yield f"from a report to the next call: {seconds(found.dispatch)}"
