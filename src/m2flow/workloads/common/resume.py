"""May a run begin in a directory, or go on there, and from which checkpoint?

Asked before anything is started, and what is written to find out is removed again: a fresh run
never touches another one, and a resumed run goes on as it began, from a checkpoint that is whole.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from m2flow.errors import UserError, is_there, reading
from m2flow.observe.run_directory import RunDirectory, default_name, read_document
from m2flow.workloads.common.reading import read_yaml, validated
from m2flow.workloads.common.recipe import Recipe

MAY_CHANGE = {
    "steps", "mode", "lanes", "lane_memory", "layouts", "deadline_seconds",
    "load_deadline_seconds", "grace_seconds", "lane_restarts", "elastic", "spare_lanes",
    "snapshot_every", "max_skipped_updates", "journal_gb", "logger", "samples_logged_per_step",
    "evaluation", "checkpoint", "training.tokens_per_microbatch", "training.sharing",
    "training.gradient_checkpointing", "training.optimizer_on_host", "training.fused_kernels",
    "generation.max_running", "generation.cache_gb", "generation.captured_decode",
    "judge.max_running", "judge.cache_gb", "reward_model.tokens_per_microbatch",
    "update.turns_per_microbatch", "update.gradient_checkpointing",
    "environment.processes", "environment.python", "environment.deadlines",
    "environment.steps_aside",
}  # fmt: skip
"""Keys that may differ when a run is resumed: they change no weight, but by rounding."""

FREE_TABLES = {
    "data.options", "data.dataset", "data.chat_options", "judge.chat_options",
    "environment.options", "tiny", "states",
}  # fmt: skip
"""Tables whose keys the user chooses."""


def run_of(checkpoint: Path) -> Path | None:
    """The directory of the run that wrote a checkpoint or a starting model; None if none did.

    A `config.yaml` further up may be anybody's.
    """
    inside = checkpoint.resolve()
    for path in inside.parents[:3]:
        run = RunDirectory(path)
        written = any(inside.is_relative_to(one) for one in (run.checkpoints, run.warmup))
        if written and _is_run(run):
            return path
    return None


def _is_run(run: RunDirectory) -> bool:
    """Whether m2flow wrote a directory: `config.yaml` and `checkpoints` alone may be anybody's."""
    if not run.config.is_file():
        return False
    if run.run.is_file():
        return True
    try:
        return "workload" in (read_document(run.config) or {})
    except UserError:  # it is no recipe at all
        return False


def check_model(path: Path) -> None:
    """Refuse what cannot be the model of a command: nothing, or a run in place of its checkpoint.

    Raises:
        UserError: names what would do.
    """
    if not is_there(path):
        raise UserError("no such file or folder", key="MODEL", value=str(path))
    run = RunDirectory(path)
    with reading(path):
        is_run = _is_run(run) and (run.run.is_file() or run.checkpoints.is_dir())
    if is_run:
        checkpoint = run.checkpoints / "latest"
        raise UserError(
            "is a run, and has a model for each checkpoint", key="MODEL", value=str(path),
            hint=f"name one of them, such as {checkpoint}",
        )  # fmt: skip


def recipe_of(run: Path) -> Recipe:
    """The recipe of a run.

    Raises:
        UserError: its `config.yaml` is none.
    """
    path = RunDirectory(run).config
    keys = read_yaml(path)
    try:
        return validated(keys)
    except UserError as error:
        raise UserError(
            error.message, key=f"{path}: {error.key}", value=error.value, expected=error.expected,
            hint=error.hint,
        ) from None  # fmt: skip


def check_directory(recipe: Recipe, run_dir: Path | None, resume: bool) -> None:
    """A fresh run writes over no other, and a resumed one goes on as it began."""
    parent = run_dir if run_dir is not None else Path("runs")
    try:
        if resume or (run_dir is not None and os.path.lexists(run_dir)):
            RunDirectory.create(run_dir, recipe.name, resume=resume)
        while not parent.exists():
            parent = parent.parent
        with TemporaryDirectory(dir=parent) as tried:  # root is allowed all, and cannot do all
            if run_dir is None:
                _check_name(Path(tried), recipe.name)
    except OSError as error:
        raise UserError(
            f"nothing can be written in {parent}: {error.strerror}",
            key="--run-dir",
            value=str(run_dir) if run_dir is not None else "runs",
            expected="a directory, or where one can be made",
        ) from error
    if not resume or run_dir is None:
        return
    run = RunDirectory(run_dir)
    if not run.config.is_file():
        raise UserError(
            "holds no config.yaml, so nothing says how the run began",
            key="--run-dir",
            value=str(run_dir),
            hint="start a new run in another directory",
        )
    try:
        read_document(run.run)
    except UserError as error:
        hint = "remove it, and the run goes on: what it has learnt is in checkpoints/"
        raise UserError(error.message, key=str(run.run), hint=hint) from error
    before = recipe_of(run_dir)
    _check_same(before.model_dump(mode="json"), recipe.model_dump(mode="json"))
    if recipe.steps != before.steps and recipe.fixed_steps is not None:
        raise UserError(
            recipe.fixed_steps,
            key="steps",
            value=recipe.steps,
            expected=str(before.steps),
            hint="start a new run to change it",
        )


def _check_name(folder: Path, name: str) -> None:
    """Refuse a name that is too long for the file system.

    Raises:
        UserError: it is.
        OSError: nothing can be written in the folder.
    """
    try:
        (folder / default_name(name, now=None, suffix=999)).mkdir()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(
            "is too long for the name of a directory",
            key="name",
            value=name,
            hint="shorten it, or name a directory with --run-dir",
        ) from error


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> None:
    for key, before in old.items():
        now = new.get(key)
        if prefix + key in MAY_CHANGE or (key in new and before == now):
            continue
        free = prefix + key in FREE_TABLES
        if isinstance(before, dict) and isinstance(now, dict) and not free:
            _check_same(before, now, f"{prefix}{key}.")
            continue
        raise UserError(
            "differs from the run that is to be resumed",
            key=prefix + key,
            value=now,
            expected=repr(before),
            hint="start a new run to change it",
        )


def resume_point(recipe: Recipe, run_dir: Path) -> Path | None:
    """The checkpoint to go on from, found whole; None where the run has not saved any.

    Raises:
        UserError: it is not whole, or it is the end of a run that is finished.
    """
    from m2flow.training import checkpoint

    found = checkpoint.resume_point(RunDirectory(run_dir).checkpoints)
    if found is None:
        return None
    steps = checkpoint.step_of(found)
    finished = (read_document(RunDirectory(run_dir).run) or {}).get("finished") is not None
    if steps > recipe.steps or (finished and steps == recipe.steps):
        raise UserError(
            f"the run has taken {steps} steps already",
            key="steps",
            value=recipe.steps,
            expected=f"more than {steps} to go on",
            hint=f"`m2flow report {shlex.quote(str(run_dir))}` writes its report",
        )
    return found
