"""Which workload examines a model, where nobody names one."""

from __future__ import annotations

from pathlib import Path

from m2flow.errors import UserError
from m2flow.workloads.common.reading import recipe_keys
from m2flow.workloads.common.registry import known_workloads, workload_named, workload_of
from m2flow.workloads.common.resume import recipe_of, run_of
from m2flow.workloads.common.workload import Workload


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
