"""Everything that a run directory says, read once, for the report to draw.

Promises: a file that is missing, half written or spoiled never stops the reading; what could not
be read is listed in `problems`. Of the samples only those that are shown are kept in memory.
Figures are looked up by their keys in `metrics.jsonl`; the few
that may be written under several keys are listed here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from m2flow.errors import UserError, reading
from m2flow.observe.jsonl import each_line, read_rows, rows_at
from m2flow.observe.run_directory import RunDirectory, merge_steps, read_document, step_of_row
from m2flow.observe.trace import Trace, read_trace
from m2flow.plan.explain import Explanation
from m2flow.plan.file import from_json

T = TypeVar("T")

EVALUATION = ("eval/accuracy", "eval/success")
ACCURACY = ("accuracy/mean", "success/mean")
LOSS = ("loss/policy", "loss")

SMALLEST, LARGEST = 1e-200, 1e200
"""Figures between these sizes are drawn."""

MAX_ROLLOUTS = 1000
"""Samples of a run that are shown, spread evenly over it."""

SHOWN = 4
"""Samples of its first and of its last step that are shown beside each other."""


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run directory; empty where a file is missing.

    Attributes:
        samples: at most `MAX_ROLLOUTS`, spread evenly over all that there are.
        samples_of_ends: the first `SHOWN` of the first step that has some, and of the last.
    """

    directory: RunDirectory
    run: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    decision: Explanation | None = None
    metrics: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    samples_of_ends: Sequence[Mapping[str, Any]] = ()
    trace: Trace = field(default_factory=Trace)
    problems: Sequence[str] = ()

    def series(self, key: str) -> list[tuple[float, float | None]]:
        """(step, value) of a key; None where the value was not finite, as of `as_number`."""
        return [(row["step"], as_number(row[key])) for row in self.metrics if key in row]

    def first_key(self, keys: Sequence[str]) -> str | None:
        """The first of `keys` with a finite value in any row."""
        for key in keys:
            if any(value is not None for _, value in self.series(key)):
                return key
        return None

    def values(self, key: str) -> list[float]:
        """The finite values of a key, in order of steps."""
        return [value for _, value in self.series(key) if value is not None]

    @property
    def name(self) -> str:
        """What the run is called: its recipe, or its directory."""
        recipe = self.run.get("recipe") or self.config.get("recipe") or self.config.get("name")
        if isinstance(recipe, str):
            return Path(recipe).name.removesuffix(".yaml")
        return self.directory.path.resolve().name

    @property
    def versions(self) -> Mapping[str, str]:
        """The version of each package that the run was made with, as far as it says."""
        found = self.run.get("versions")
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, Mapping) else {}

    @property
    def last_step(self) -> int:
        """The newest step with figures; 0 if there is none."""
        return max((row["step"] for row in self.metrics), default=0)

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run was to have, if that is known."""
        steps = self.run.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def seconds_elapsed(self) -> float | None:
        """What `seconds_taken` says of the figures."""
        return seconds_taken(self.metrics)


def seconds_taken(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The seconds of all steps and evaluations of a run, pauses before a resumption left out.

    Args:
        rows: one for each step; of rows without seconds the time from the first to the last.
    """
    spent = [as_number(row.get(key)) for row in rows for key in ("seconds/step", "eval/seconds")]
    if taken := sum(one for one in spent if one is not None):
        return taken
    times = [time for row in rows if (time := as_number(row.get("time"))) is not None]
    return times[-1] - times[0] if len(times) > 1 else None


def as_number(value: object) -> float | None:
    """`value` as a float if it is a number, else None.

    A number beyond `LARGEST`, finite or not, is none, and one within `SMALLEST` of 0 is 0: sums,
    differences and shares of what is left can be computed and drawn.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if not -LARGEST <= value <= LARGEST:
        return None
    return 0.0 if abs(value) < SMALLEST else float(value)


def read_run(path: Path | str) -> RunRecord:
    """Read a run directory.

    Raises:
        UserError: there is no such directory, or it or a file in it may not be read.
    """
    with reading(path):
        return _read_run(RunDirectory(path))


def _read_run(directory: RunDirectory) -> RunRecord:
    path = directory.path
    if not path.is_dir():
        raise UserError("no such run directory", value=str(path), hint="see ls runs/")
    problems: list[str] = []
    run = _attempt(read_document, directory.run, problems) or {}
    plan = _attempt(read_document, directory.plan, problems) or {}
    decision = _attempt(_read_decision, directory.decision, problems)
    config = _attempt(read_document, directory.config, problems) or {}
    metrics, samples = read_rows(directory.metrics), _read_samples(directory.samples)
    for file, rows in ((directory.metrics, metrics), (directory.samples, samples)):
        if rows.unreadable:
            lines = ", ".join(str(line) for line in rows.unreadable[:5])
            problems.append(f"{file.name}: {len(rows.unreadable)} unreadable lines ({lines})")
    trace = _attempt(read_trace, directory.timeline, problems)
    return RunRecord(
        directory,
        run=run,
        config=config,
        config_text=directory.config.read_text("utf-8", "replace")
        if directory.config.exists()
        else "",
        plan=plan,
        decision=decision,
        metrics=merge_steps(metrics.rows),
        samples=samples.spread,
        samples_of_ends=samples.of_ends,
        trace=trace or Trace(),
        problems=problems,
    )


class _Samples(NamedTuple):
    spread: list[dict[str, Any]]
    of_ends: list[dict[str, Any]]
    unreadable: tuple[int, ...]


def _read_samples(path: Path) -> _Samples:
    """Read a file of samples twice: once for where they are, and then those that are shown."""
    places, firsts = array("Q"), dict[int, list[int]]()
    unreadable: list[int] = []
    for number, place, row in each_line(path):
        if row is None:
            unreadable.append(number)
        elif (step := step_of_row(row)) is not None:
            places.append(place)
            if len(first := firsts.setdefault(step, [])) < SHOWN:
                first.append(place)
    if not places:
        return _Samples([], [], tuple(unreadable))
    every = -(-len(places) // MAX_ROLLOUTS)
    ends = [*firsts[min(firsts)], *(firsts[max(firsts)] if len(firsts) > 1 else ())]
    return _Samples(rows_at(path, places[::every]), rows_at(path, ends), tuple(unreadable))


def _read_decision(path: Path) -> Explanation:
    return from_json(Explanation, path.read_text("utf-8", "replace"), str(path))


def _attempt(read: Callable[[Path], T | None], path: Path, problems: list[str]) -> T | None:
    if not path.exists():
        return None
    try:
        return read(path)
    except UserError as error:
        problems.append(str(error).replace(str(path), path.name))
        return None
