"""The directory of one run: who owns which file, how each is written, and how a run resumes.

Promises: a fresh run never writes over an old one; documents (`config.yaml`, `plan.json`) appear
whole or not at all; rows (`metrics.jsonl`, `samples.jsonl`) are flushed one by one; after
`cut_after` no step is reported twice. Knows nothing of what is trained, nor how checkpoints look
inside.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from m2flow.errors import CannotWrite, UserError, writing
from m2flow.observe.films import Film, write_films
from m2flow.observe.jsonl import (
    append_rows,
    cut_after_step,
    encode,
    read_rows,
    synchronise,
    write_atomically,
    write_in_place,
)
from m2flow.observe.yaml_text import to_yaml

MARKS = ("run.json", "config.yaml", "metrics.jsonl", "samples.jsonl", "plan.json", "checkpoints")
"""A directory that holds any of these holds a run."""

SKIPPED_KEPT = 50
"""So many files of `skipped/` stay of the first steps, and as many of the newest."""

HELD_SECONDS = 5.0
"""How long processes that a killed launcher has begun may outlive it."""


class RunDirectory:
    """The files of a run. Making this object touches nothing on disk; `create` does."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.run = self.path / "run.json"
        self.config = self.path / "config.yaml"
        self.warmup = self.path / "warmup"
        self.plan = self.path / "plan.json"
        self.decision = self.path / "decision.json"
        self.profile = self.path / "profile.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.timeline = self.path / "timeline.json"
        self.timeline_picture = self.path / "timeline.svg"
        self.tensorboard = self.path / "tensorboard"
        self.films = self.path / "films"
        self.failure = self.path / "failure.txt"
        self.skipped = self.path / "skipped"
        self.checkpoints = self.path / "checkpoints"
        self.journal = self.path / "journal"
        self.report = self.path / "report.html"
        self._made = False
        self._found: Container[Path] = ()

    @classmethod
    def create(
        cls,
        path: Path | str | None,
        recipe_name: str,
        *,
        resume: bool = False,
        now: float | None = None,
    ) -> RunDirectory:
        """Make the directory of a fresh run, or open that of a run to resume.

        Args:
            path: where; None means `runs/<recipe>-<YYYYmmdd-HHMMSS>`, made unique.
            recipe_name: the recipe's name, or the path of its file.
            resume: the directory must hold a run; without it, it must hold none.
            now: Unix seconds of the start, for the default name; the current time if None.

        Raises:
            UserError: the directory holds a run already, or holds none to resume, or is none.
        """
        if path is None:
            if resume:
                raise UserError(
                    "which run should be resumed?",
                    key="--resume",
                    hint="name its directory with --run-dir DIR",
                )
            directory = cls(_new_directory(Path("runs"), recipe_name, now))
            directory._made = True
            return directory
        directory = cls(path)
        found = [name for name in MARKS if (directory.path / name).exists()]
        if directory.path.exists() and not directory.path.is_dir():
            raise UserError("is a file", key="--run-dir", value=str(path), expected="a directory")
        if directory.path.is_symlink() and not directory.path.exists():
            raise UserError(
                "is a link to what is not there",
                key="--run-dir",
                value=str(path),
                expected="a directory",
                hint=f"make {directory.path.readlink()}, or remove the link",
            )
        if resume and not found:
            raise UserError(
                "holds no run to resume",
                key="--run-dir",
                value=str(path),
                expected="a directory that m2flow train wrote",
                hint="leave out --resume to start a fresh run there",
            )
        if found and not resume:
            raise UserError(
                f"holds a run already ({', '.join(found)})",
                key="--run-dir",
                value=str(path),
                hint="add --resume to go on with it, or name another directory",
            )
        directory._made = not directory.path.exists()
        with writing("the run directory", directory.path):
            directory.path.mkdir(parents=True, exist_ok=True)
        directory._found = set(directory.path.iterdir())
        return directory

    def discard(self) -> None:
        """Remove what a run that `create` has begun wrote, and the directory if it was made for it.

        What lay there before stays, and what is of others, such as the records of services.
        """
        for path in vars(self).values():
            if not isinstance(path, Path) or path == self.path or path in self._found:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self._made and not any(self.path.iterdir()):
            self.path.rmdir()

    def write_run(self, **facts: object) -> None:
        """Add facts to `run.json`: recipe, mode, seed, machine, steps, started, finished, ..."""
        write_atomically(self.run, self._with(facts))

    def note_end(self, **facts: object) -> None:
        """Add to `run.json` why a run has ended, which may be that the disk is full."""
        try:
            self.write_run(**facts)
        except CannotWrite:
            write_in_place(self.run, self._with(facts))

    def _with(self, facts: Mapping[str, object]) -> bytes:
        known = read_document(self.run) or {}
        return encode({**known, **facts}, indent=2) + b"\n"

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write the resolved configuration, every default included, in the order given."""
        write_atomically(self.config, to_yaml(config).encode())

    def write_json(self, path: Path, text: str) -> None:
        """Write the plan, profile or decision, as `m2flow.plan.file.to_json` gives it."""
        write_atomically(path, text.encode())

    def write_films(self, step: int, films: Sequence[Film]) -> list[Path]:
        """Write the films of an evaluation, as `write_films` of `observe/films.py`; their files."""
        if films:
            with writing("a film", self.films):
                self.films.mkdir(exist_ok=True)
        return write_films(self.films, step, films)

    def write_skipped(self, step: int, rows: Iterable[Mapping[str, object]]) -> Path:
        """Write the rollouts of a step that was left out, as `skipped/step_NNNNNN.jsonl`.

        Of the others stay those of the first `SKIPPED_KEPT` steps, and of as many of the newest.
        """
        file = self.skipped / f"step_{step:06d}.jsonl"
        with writing("the rollouts of a step that was left out", file):
            self.skipped.mkdir(exist_ok=True)
        write_atomically(file, b"".join(encode({"step": step, **row}) + b"\n" for row in rows))
        files = sorted(self.skipped.glob("step_*.jsonl"), key=lambda one: (len(one.name), one.name))
        for old in files[SKIPPED_KEPT:-SKIPPED_KEPT]:
            if old != file:
                old.unlink()
        return file

    def append_metrics(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append one line for a step; `time` is Unix seconds unless `metrics` brings its own."""
        assert "step" not in metrics or metrics["step"] == step, "two steps in one row"
        append_rows(self.metrics, [{"step": step, "time": time.time(), **metrics}])

    def append_samples(self, step: int, samples: Iterable[Mapping[str, object]]) -> None:
        """Append rollouts: `item`, `prompt`, `completion`, `reward`, `answer`, `finish_reason`."""
        append_rows(self.samples, ({"step": step, **sample} for sample in samples))

    def synchronise(self) -> None:
        """Have the disk hold all rows, before a checkpoint says that their steps are done."""
        for path in (self.metrics, self.samples):
            if path.exists():
                with writing(path.name, path):
                    synchronise(path)

    def cut_after(self, step: int) -> int:
        """Go back to a checkpoint's step: rows of later steps and torn lines leave both files, and
        later steps' films and left-out rollouts go.

        Returns:
            The number of lines removed.
        """
        for path in (*self.skipped.glob("step_*.jsonl"), *self.films.glob("*_*_*.*")):
            number = path.stem.split("_")[1]
            if number.isdecimal() and int(number) > step:
                path.unlink()
        return cut_after_step(self.metrics, step) + cut_after_step(self.samples, step)


def alarms_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a `run.json` says that the run was alarmed about: `step` and `alarm` of each."""
    found = run.get("alarms")
    return [
        one
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, dict)
        and isinstance(one.get("step"), int)
        and isinstance(one.get("alarm"), str)
    ]


def read_metrics(directory: Path | str) -> list[dict[str, Any]]:
    """The metrics of a run, one row per step in order; lines of one step are merged."""
    return merge_steps(read_rows(RunDirectory(directory).metrics).rows)


def first_and_last(
    rows: Iterable[Mapping[str, Any]], averaged: Container[str] = ()
) -> tuple[dict[str, float], dict[str, float]]:
    """Of every figure in the rows, its first value and its last, as `progress.summary` takes them.

    Keys are looked at one by one: accuracy on held-out items is not measured at each step. Of those
    in `averaged` it is the mean of the first steps, and of the last, as `ends` has them.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, (int, float)):
                values.setdefault(key, []).append(value)
    found = {
        key: ends(some)[:2] if key in averaged else (some[0], some[-1])
        for key, some in values.items()
    }
    return {key: one for key, (one, _) in found.items()}, {
        key: one for key, (_, one) in found.items()
    }


def ends(values: Sequence[float]) -> tuple[float, float, int]:
    """Where a noisy figure begins and ends.

    Returns:
        The first value, the last, and 1; of 20 values or more the means of the first and the last
        tenth, and of how many they are.
    """
    if len(values) < 20:
        return values[0], values[-1], 1
    window = max(3, len(values) // 10)
    return fmean(values[:window]), fmean(values[-window:]), window


def merge_steps(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per step, ordered by step; where two lines name a key, the later one holds."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        if (step := step_of_row(row)) is not None:
            merged.setdefault(step, {}).update(row)
    return [merged[step] for step in sorted(merged)]


def step_of_row(row: Mapping[str, Any]) -> int | None:
    """The step that a row is of; None where it names none that a chart has a place for."""
    step = row.get("step")
    return step if isinstance(step, int) and abs(step) < 2**63 else None


def read_document(path: Path) -> dict[str, Any] | None:
    """The object in a JSON or YAML file; None where there is no file.

    Raises:
        UserError: the file holds something else.
    """
    if not path.exists():
        return None
    try:
        content = (yaml.safe_load if path.suffix == ".yaml" else json.loads)(path.read_bytes())
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"cannot be read: {error}", key=str(path)) from error
    if not isinstance(content, dict):
        raise UserError("holds no object", key=str(path), expected="keys and values")
    return content


@contextmanager
def held(directory: Path, seconds: float = HELD_SECONDS) -> Iterator[None]:
    """Be the only process that writes a run.

    The system's lock on the directory goes with the process that has it, however that ends. A file
    system that has no such locks is done without.

    Args:
        directory: of the run.
        seconds: longest to wait for another process to end.

    Raises:
        UserError: another process trains there.
    """
    lock = os.open(directory, os.O_RDONLY)
    try:
        deadline = time.monotonic() + seconds
        while _is_held_elsewhere(lock):
            if time.monotonic() > deadline:
                raise UserError(
                    "another process trains there",
                    key="--run-dir",
                    value=str(directory),
                    hint="wait for its end, or end it",
                )
            time.sleep(0.1)
        yield
    finally:
        os.close(lock)


def _is_held_elsewhere(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def default_name(recipe_name: str, now: float | None, suffix: int = 1) -> str:
    """What a run's directory is called where nobody names it.

    Args:
        recipe_name: the recipe's name, or the path of its file.
        now: Unix seconds of the start; the current time if None.
        suffix: counts the runs of one name that start in the same second, from 1.
    """
    stem = Path(recipe_name).name.removesuffix(".yaml").removesuffix(".yml")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{name}-{stamp}" + (f"-{suffix}" if suffix > 1 else "")


def _new_directory(parent: Path, recipe_name: str, now: float | None) -> Path:
    suffix = 1
    while True:
        path = parent / default_name(recipe_name, now, suffix)
        with writing("the run directory", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                suffix += 1
            else:
                return path
