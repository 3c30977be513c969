"""Examining a model: which workload does, where nobody names one, and what a flow says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.flow import Batch, Flow
from m2flow.workloads.common.planning import named_layouts
from m2flow.workloads.common.reading import recipe_keys
from m2flow.workloads.common.registry import known_workloads, workload_named, workload_of
from m2flow.workloads.common.resume import recipe_of, run_of
from m2flow.workloads.common.workload import Examination, Workload

if TYPE_CHECKING:
    from m2flow.runtime.driver.runner import StepResult

HEEDED = ("model", "data", "limit", "lanes", "layout")
"""What every workload heeds of an `Examination`."""

OPTIONS = {"chat_options": "--chat-option", "skip_bad_rows": "--on-bad-row"}
"""Of `m2flow eval`, where they are not called as the fields of an `Examination`."""


def examiner_of(model: Path, data: Path | None) -> Workload:
    """The workload of the recipe that is asked about, of the model's run, or that reads problems.

    Args:
        model: a checkpoint of a run, or a model's folder.
        data: a recipe, or a file of problems; None where the run says what is asked.

    Raises:
        UserError: nothing says which.
    """
    if data is None:
        if (run := run_of(model)) is None:
            raise UserError(
                "is missing",
                key="--data",
                expected="a file of problems or a recipe",
                hint="a checkpoint of a run as MODEL may need none",
            )
        return workload_of(recipe_of(run))
    if data.suffix in (".yaml", ".yml"):
        return workload_named(recipe_keys(data).get("workload"))
    readers = [name for name in known_workloads() if workload_named(name).reads_problems]
    if len(readers) > 1:
        raise UserError("is missing", key="--workload", expected=" or ".join(sorted(readers)))
    return workload_named(readers[0])


def examined(
    flow: Flow, batch: Batch, lanes: Sequence[LaneSpec], layout: str | None, holder: str
) -> StepResult:
    """Run `evaluate` of a flow once; what trains is not loaded.

    Args:
        flow: with the workers of its training, or without them.
        batch: what is examined.
        lanes: where.
        layout: how lanes share a model, as `--layout` names it; None where each holds all of it.
        holder: the worker that holds the model.

    Raises:
        UserError: the worker has no such layout on these lanes.
    """
    from m2flow.runtime.driver.launch import launch

    alone = flow.alone("evaluate")
    named = {} if layout is None else {holder: layout}
    layouts = named_layouts(named, alone, lanes, everywhere=True, option="--layout")
    mode = "eager" if len(lanes) == 1 else "collocated"
    with launch(alone, items_per_step=len(batch), mode=mode, lanes=lanes, layouts=layouts) as run:
        return run.step(batch)


def refuse_unheeded(asked: Examination, *heeded: str) -> None:
    """Refuse what is asked and would change nothing.

    Args:
        asked: what `m2flow eval` asks.
        heeded: fields of it that the workload heeds, beside `HEEDED`.

    Raises:
        UserError: names the option, and those that are heeded.
    """
    known = {
        field.name: OPTIONS.get(field.name, f"--{field.name.replace('_', '-')}")
        for field in fields(asked)
    }
    for field in fields(asked):
        value = getattr(asked, field.name)
        if field.name not in (*HEEDED, *heeded) and value != field.default:
            others = ", ".join(known[name] for name in (*HEEDED[1:], *heeded))
            raise UserError(
                "changes nothing: the run or the recipe says how its policy acts",
                key=known[field.name],
                value=value,
                hint=f"what does: {others}",
            )
