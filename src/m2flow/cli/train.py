"""`m2flow train`: run a recipe, or say what would be run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from m2flow.observe.progress import summary
from m2flow.observe.run_directory import first_and_last, read_metrics
from m2flow.workloads import common
from m2flow.workloads.common.start import describe


def train(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    plan_file: Path | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
) -> None:
    """Run a recipe and print how it ended; see `m2flow.workloads.common.train`.

    Args:
        recipe: the YAML file.
        overrides: `key=value`.
        plan_file: a plan to run instead of the mode's.
        run_dir: where the run is kept.
        resume: go on from the last checkpoint in `run_dir`.
        dry_run: print what would be run, and start nothing.
    """
    if dry_run:
        print("\n".join(describe(common.read_recipe(recipe, overrides), plan_file)))
        return
    path = common.train(recipe, overrides, plan=plan_file, run_dir=run_dir, resume=resume)
    print(summary(*first_and_last(read_metrics(path)), path))
