"""`m2flow train`: a recipe from start to report, or on from its last checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from m2flow.cli.planning import AUTO_MODE, check_runnable, graph_of, lanes_of, planned
from m2flow.cli.recipe import read_recipe
from m2flow.cli.resume import check_directory, resume_point
from m2flow.engine.plan import LaneSpec
from m2flow.observe.loggers import make_loggers
from m2flow.observe.progress import TrainProgress, summary
from m2flow.observe.run_directory import RunDirectory, first_and_last, read_metrics
from m2flow.plan import describe_plan
from m2flow.workloads.reasoning.config import ReasoningRecipe

if TYPE_CHECKING:
    from m2flow.runtime.driver.ahead import LanesAhead

WORKERS_NEED = (
    "m2flow.models.causal_lm",
    "m2flow.generation.native",
    "m2flow.training.policy",
    "m2flow.workloads.reasoning.learning",
)
"""What takes lanes seconds to import."""


def train(
    recipe_path: Path,
    overrides: Sequence[str] = (),
    *,
    plan_file: Path | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
) -> Path | None:
    """Run a recipe.

    Args:
        recipe_path: the YAML file.
        overrides: `key=value`.
        plan_file: a plan to run instead of the mode's.
        run_dir: where the run is kept; a new folder below `runs/` by default.
        resume: go on from the last checkpoint in `run_dir`.
        dry_run: print what would be run, and start nothing.

    Returns:
        The run directory; None for a dry run.

    Raises:
        UserError: the input is wrong; nothing was started or written.
        RunFailed: the run stopped.
    """
    recipe = read_recipe(recipe_path, overrides)
    if dry_run:
        print("\n".join(describe(recipe, plan_file)))
        return None
    check_directory(recipe, run_dir, resume)
    plan = None
    if plan_file is not None or recipe.mode != AUTO_MODE:
        _, plan = planned(recipe, plan_file)
        check_runnable(plan)
    mode = AUTO_MODE if plan is None else plan.mode
    lanes = lanes_of(recipe) if plan is None else plan.lanes
    _check_loggers(recipe)
    # A picture that is redrawn would paint over the debugger's prompt.
    with TrainProgress(live=False if mode == "eager" else None) as progress:
        progress.start(
            f"m2flow: {recipe.name}, seed {recipe.seed}, {recipe.steps} steps of "
            f"{recipe.prompts_per_step} x {recipe.samples_per_prompt} samples, mode {mode}"
        )
        checkpoint = resume_point(recipe, run_dir) if resume and run_dir is not None else None
        with _lanes_ahead(mode, lanes) as ahead:
            from m2flow.cli.training import Training
            from m2flow.workloads.reasoning.experiment import (
                ReasoningExperiment,  # imports torch: seconds
            )

            experiment = ReasoningExperiment(recipe)
            training = Training(
                experiment, plan, ahead, run_dir, progress, resumed=resume, checkpoint=checkpoint
            )
            directory = training.run()
    print(summary(*first_and_last(read_metrics(directory.path)), directory.path))
    return directory.path


@contextmanager
def _lanes_ahead(mode: str, lanes: Sequence[LaneSpec]) -> Iterator[LanesAhead | None]:
    """The lanes, which start beside what else there is to do; None for an eager run."""
    if mode == "eager":
        yield None
        return
    from m2flow.runtime.driver.ahead import LanesAhead

    with LanesAhead(lanes, WORKERS_NEED) as ahead:
        yield ahead


def describe(recipe: ReasoningRecipe, plan_file: Path | None = None) -> list[str]:
    """What a recipe amounts to, in lines for people: every value, derived sizes, graph, plan."""
    import yaml

    lines = [yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).rstrip(), "derived:"]
    lines += [f"  {key}: {value}" for key, value in recipe.derived().items()]
    if recipe.mode == AUTO_MODE and plan_file is None:
        lanes_of(recipe)  # refused now, if they are wrong
        graph = graph_of(recipe)
        words = ["plan: auto: the stages are measured when the run begins, then the best is chosen"]
    else:
        graph, plan = planned(recipe, plan_file)
        words = describe_plan(plan, graph, recipe.prompts_per_step)
    return [*lines, "flow:", *(f"  {line}" for line in graph.describe()), *words]


def _check_loggers(recipe: ReasoningRecipe) -> None:
    """Refuse a logger whose package is missing before anything is written."""
    with tempfile.TemporaryDirectory() as nowhere:
        make_loggers(recipe.logger, RunDirectory(nowhere)).close()
