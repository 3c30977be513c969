"""Examining a model: which workload does, where nobody names one, and what a flow says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow import Batch, Flow
from m2flow.plan import build_plan, isolated_workers
from m2flow.plan.chunks import in_time
from m2flow.workloads.common.planning import named_layouts
from m2flow.workloads.common.reading import read_recipe, recipe_keys
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import known_workloads, workload_named, workload_of
from m2flow.workloads.common.resume import recipe_of, run_of
from m2flow.workloads.common.workload import Examination, Workload

if TYPE_CHECKING:
    from m2flow.runtime.driver.runner import StepResult

R = TypeVar("R", bound=Recipe)

HEEDED = ("data", "limit", "lanes", "layout", "deadline_seconds")
"""What every workload heeds of an `Examination`, beside the model."""

OPTIONS = {"chat_options": "--chat-option", "skip_bad_rows": "--on-bad-row"}
"""Of `m2flow eval`, where they are not called as the fields of an `Examination`."""


def examiner_of(model: Path, data: Path | None) -> Workload:
    """The workload of the recipe that is asked about, of the model's run, or that reads problems.

    Args:
        model: a checkpoint of a run, or a model's folder.
        data: a recipe, or a file of problems; None where the run says what is asked.

    Raises:
        UserError: nothing says which, or the model's run asks in another way than by problems.
    """
    run = run_of(model)
    if data is None:
        if run is None:
            raise UserError(
                "is missing",
                key="--data",
                expected="a file of problems or a recipe",
                hint="a checkpoint of a run as MODEL may need none",
            )
        return workload_of(recipe_of(run))
    if data.suffix in (".yaml", ".yml"):
        return workload_named(recipe_keys(data).get("workload"))
    readers = sorted(name for name in known_workloads() if workload_named(name).reads_problems)
    named, recipe = " or ".join(readers), None if run is None else recipe_of(run)
    if recipe is not None and not workload_of(recipe).reads_problems:
        raise UserError(
            f"is no recipe, and MODEL is of an {recipe.workload} run: problems of a file are asked "
            "in one turn, without tools or environment",
            key="--data",
            value=str(data),
            hint=f"leave it out, or have them asked so by --workload {named}",
        )
    if len(readers) > 1:
        raise UserError("is missing", key="--workload", expected=named)
    return workload_named(readers[0])


def recipe_examined(asked: Examination, kind: type[R], model: Mapping[str, object]) -> R:
    """The recipe by which a policy is judged: that of its run, or the one that `asked.data` names.

    Args:
        asked: what `m2flow eval` asks.
        kind: the workload's type of recipe.
        model: keys of a recipe of `asked.data` that name the model.

    Raises:
        UserError: it is another workload's, or there is none.
    """
    recipe: Recipe | None
    if asked.data is not None:
        recipe = read_recipe(asked.data, model)
    else:
        run = run_of(asked.model)
        recipe = None if run is None else recipe_of(run)
    if not isinstance(recipe, kind):
        raise UserError(
            f"is no checkpoint of an {kind.model_fields['workload'].default} run",
            key="MODEL",
            value=str(asked.model),
            expected="RUN/checkpoints/latest, or a model's folder and --data RECIPE",
        )
    return recipe


def examined(
    flow: Flow,
    batch: Batch,
    lanes: Sequence[LaneSpec],
    layout: str | None,
    holder: str,
    deadline_seconds: float,
    at_once: int | None = None,
) -> StepResult:
    """Run `evaluate` of a flow on a batch; what trains is not loaded.

    Args:
        flow: with the workers of its training, or without them.
        batch: what is examined.
        lanes: where.
        layout: how lanes share a model, as `--layout` names it; None where each holds all of it.
        holder: the worker that holds the model.
        deadline_seconds: longest that a call may give nothing; see `deadline_of`.
        at_once: items that are under way at a time, at most; None for all of them.

    Raises:
        UserError: the worker has no such layout on these lanes.
    """
    from m2flow.runtime.driver.launch import launch

    alone = flow.alone("evaluate")
    named = {} if layout is None else {holder: layout}
    layouts = named_layouts(named, alone, lanes, everywhere=True, option="--layout")
    mode = "eager" if len(lanes) == 1 else "collocated"
    graph, count = alone.trace(), wave_size(len(batch), at_once)
    plan = build_plan(mode, graph, lanes, count, isolated_workers(alone), layouts)
    stages = in_time(graph, plan.stages, count)
    plan = replace(plan, stages=stages, deadline_seconds=deadline_seconds)
    with launch(alone, items_per_step=count, plan=plan) as run:

        def ask(wave: Batch) -> StepResult:  # the last one may be smaller than a step
            return run.step(wave) if len(wave) == count else run.run_method("step", wave)

        return in_waves(ask, batch, count)


def wave_size(count: int, at_once: int | None) -> int:
    """Items of each of the waves in which `count` items are examined; the last may have fewer.

    There are no more waves than it takes, and they are about equal.
    """
    if at_once is None or count <= at_once:
        return count
    waves = -(-count // at_once)
    return -(-count // waves)


def in_waves(ask: Callable[[Batch], StepResult], batch: Batch, size: int) -> StepResult:
    """Examine items in waves, one after the other.

    Args:
        ask: runs a method of a flow that trains nothing.
        batch: what is examined.
        size: items of a wave.

    Returns:
        The result of the first wave, with the output of all in the order of the batch, with all
        spans and notes, and with the seconds of all waves.
    """
    if len(batch) <= size:
        return ask(batch)
    rows = range(len(batch))
    found = [ask(batch.select(rows[first : first + size])) for first in rows[::size]]
    outputs = Batch.concat([Batch(one.output.columns) for one in found])
    return replace(
        found[0],
        output=Batch(outputs.columns),
        spans=[span for one in found for span in one.spans],
        seconds=sum(one.seconds for one in found),
        notes=tuple(note for one in found for note in one.notes),
    )


def deadline_of(asked: Examination, recipe: Recipe | None) -> float:
    """The deadline of calls: the one that is asked for, else the recipe's, if there is one."""
    if asked.deadline_seconds is not None:
        return asked.deadline_seconds
    return Plan.deadline_seconds if recipe is None else recipe.deadline_seconds


def refuse_unheeded(asked: Examination, *heeded: str) -> None:
    """Refuse what is asked and would change nothing.

    Args:
        asked: what `m2flow eval` asks.
        heeded: fields of it that the workload heeds, beside `HEEDED`.

    Raises:
        UserError: names the option, and those that are heeded.
    """
    does = (*HEEDED, *heeded)
    for field in fields(asked):
        value = getattr(asked, field.name)
        if field.default is not MISSING and field.name not in does and value != field.default:
            raise UserError(
                "changes nothing: the run or the recipe says how its policy acts",
                key=_option(field.name),
                value=value,
                hint=f"what does: {', '.join(map(_option, does))}",
            )


def _option(field: str) -> str:
    """The option of `m2flow eval` that sets a field of an `Examination`."""
    return OPTIONS.get(field, f"--{field.replace('_', '-')}")
