"""`train`: a recipe from start to report, or on from its last checkpoint; and what it would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.observe.loggers import check_services
from m2flow.observe.metrics_log import tensorboard
from m2flow.observe.progress import Progress, TrainProgress
from m2flow.observe.run_directory import held
from m2flow.observe.yaml_text import to_yaml
from m2flow.plan import describe_plan, isolated_workers
from m2flow.plan.choose import choose
from m2flow.plan.machine import gpu_names
from m2flow.runtime.driver.auto import EFFORT, GUESSES
from m2flow.workloads.common.accounting import memory_lines
from m2flow.workloads.common.computed import computed_profile, whose_figures
from m2flow.workloads.common.planning import (
    check_build,
    check_runnable,
    flow_of,
    lanes_of,
    layouts_of,
    planned,
)
from m2flow.workloads.common.reading import Source, read_recipe
from m2flow.workloads.common.recipe import AUTO_MODE, Recipe
from m2flow.workloads.common.registry import workload_of
from m2flow.workloads.common.resume import check_directory, resume_point
from m2flow.workloads.common.stopping import Stopping

if TYPE_CHECKING:
    from m2flow.runtime.driver.ahead import LanesAhead


def train(
    source: Source,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    plan: str | Path | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Run a recipe, and show how far it has come.

        train("recipes/quickstart.yaml", {"steps": 20, "optimizer.learning_rate": 1e-3})

    Args:
        source: the recipe: a YAML file, a name of m2flow's own, a table of keys, or a `Recipe`.
        overrides: `key=value` each, or values by key; a dot leads into a section.
        plan: a plan file to run instead of the mode's plan.
        run_dir: where the run is kept; a new folder below `runs/` by default.
        resume: go on from the last checkpoint in `run_dir`.
        progress: what shows how far the run has come; None for bars or lines on standard output.

    Returns:
        The run directory.

    Raises:
        UserError: the input is wrong; of a fresh run nothing is left, unless a step was done.
        RunFailed: the run failed; as `CannotWrite` where there is no room for what it writes.
        Stopped: SIGTERM, SIGHUP or SIGINT has ended it, after a checkpoint if there was time.
    """
    recipe = read_recipe(source, overrides)
    plan_file = None if plan is None else Path(plan)
    directory = None if run_dir is None else Path(run_dir)
    check_directory(recipe, directory, resume)
    chosen = None
    if plan_file is not None or recipe.mode != AUTO_MODE:
        _, chosen = planned(recipe, plan_file)
        check_runnable(chosen)
    else:
        check_layouts(recipe)
    mode = AUTO_MODE if chosen is None else chosen.mode
    lanes = lanes_of(recipe) if chosen is None else chosen.lanes
    check_build(lanes)
    workload = workload_of(recipe)
    workload.check_here(recipe)
    if "tensorboard" in recipe.logger:
        tensorboard()  # refuses where the package is missing, before anything is written
    check_services(recipe.logger)
    # A picture that is redrawn would paint over the debugger's prompt.
    live = False if mode == "eager" else None
    with (
        held(directory) if resume and directory else nullcontext(),
        Stopping(recipe.grace_seconds) as stopping,
        progress or TrainProgress(live=live) as progress,
    ):
        progress.start(
            f"m2flow: {recipe.name}, seed {recipe.seed}, {recipe.steps} steps of "
            f"{recipe.step_size}, mode {mode}"
        )
        checkpoint = resume_point(recipe, directory) if resume and directory else None
        with _lanes_ahead(recipe, mode, lanes, workload.modules) as ahead:
            from m2flow.workloads.common.run import Training

            if ahead is not None:
                ahead.may_import()
            experiment = workload.experiment(recipe)  # imports torch: seconds
            training = Training(
                experiment,
                chosen,
                ahead,
                directory,
                progress,
                resumed=resume,
                checkpoint=checkpoint,
                stopping=stopping,
            )
            return training.run().path


@contextmanager
def _lanes_ahead(
    recipe: Recipe, mode: str, lanes: Sequence[LaneSpec], modules: Sequence[str]
) -> Iterator[LanesAhead | None]:
    """The lanes, which start beside what else there is to do; None for an eager run."""
    if mode == "eager":
        yield None
        return
    from m2flow.runtime.driver.ahead import LanesAhead

    spares = recipe.spare_lanes if recipe.lane_restarts else 0
    seconds = recipe.load_deadline_seconds
    with LanesAhead(lanes, modules, spares, start_seconds=seconds) as ahead:
        yield ahead


def check_layouts(recipe: Recipe) -> None:
    """Refuse lanes, a model and layouts of which no plan could be made."""
    layouts_of(recipe, flow_of(recipe), lanes_of(recipe))


def describe(recipe: Recipe, plan_file: Path | None = None) -> list[str]:
    """What a recipe amounts to, in lines for people: every value, derived sizes, graph, plan.

    Raises:
        UserError: lanes, layouts, model or plan are wrong, or a package is missing.
    """
    workload = workload_of(recipe)
    workload.check_here(recipe)
    lines = [to_yaml(recipe.model_dump(mode="json")).rstrip(), "derived:"]
    lines += [f"  {key}: {value}" for key, value in recipe.derived().items()]
    if recipe.mode == AUTO_MODE and plan_file is None:
        check_layouts(recipe)
        graph = flow_of(recipe).trace()
        words = ["plan: auto: the first steps are measured, and the best plan is found by trying"]
        words += _beginning(recipe)
    else:
        graph, plan = planned(recipe, plan_file)
        words = describe_plan(plan, graph, recipe.items_per_step)
        words += memory_lines(recipe, graph, plan)
    gone = [f"  {line}" for line in workload.lacking(recipe)]
    gone = ["what a run would miss:", *gone] if gone else []
    return [*lines, "flow:", *(f"  {line}" for line in graph.describe()), *words, *gone]


def beginning(recipe: Recipe) -> tuple[FlowGraph, Plan, str]:
    """The graph, the plan that a run in mode `auto` begins with where no profile is stored, and
    what it is chosen by; nothing, if it is a guess.

    Raises:
        UserError: no plan keeps the limits, or the guess does not fit.
    """
    flow, lanes = flow_of(recipe), lanes_of(recipe)
    graph, isolated, names = flow.trace(), isolated_workers(flow), gpu_names()
    told = {names[lane.gpu] for lane in lanes if lane.gpu is not None and lane.gpu < len(names)}
    name = ", ".join(sorted(told))
    profile = computed_profile(recipe, graph, lanes, name)
    if profile is None:
        return *planned(recipe.model_copy(update={"mode": GUESSES[0]})), ""
    plan = choose(
        graph,
        profile,
        lanes,
        recipe.items_per_step,
        max_staleness=recipe.max_staleness,
        isolated=isolated,
        layouts=layouts_of(recipe, flow, lanes),
        effort=EFFORT,
    ).chosen.plan
    plan = replace(plan, deadline_seconds=recipe.deadline_seconds)
    return graph, plan, f"by a profile computed {whose_figures(name)}"


def _beginning(recipe: Recipe) -> list[str]:
    """The plan that a run begins with where nothing is measured, and its memory account."""
    try:
        graph, plan, by = beginning(recipe)
    except UserError as error:
        return [f"  as it begins: {error}"]
    memory = memory_lines(recipe, graph, plan)
    if not by:
        return [f"  as it begins, {GUESSES[0]}:", *memory]
    _, *described = describe_plan(plan, graph, recipe.items_per_step)
    return [f"  as it begins, {by}, unless one is stored:", *described, *memory]
