"""What is seen while a run goes on: bars on a terminal, plain lines elsewhere, JSON, or nothing.

Promises: something appears at once; on a terminal one line is redrawn per phase, in a log one line
is written at most every `SECONDS_BETWEEN_LINES`, flushed, besides the first and last line of a
phase and every evaluation. JSON is for programs: one object a line, and nothing else on that
stream. Where whoever reads has gone (`| head`), the run goes on unseen. Takes metrics by their keys
in `metrics.jsonl`; knows no workload.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self, TextIO, TypeAlias

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RedrawnProgress
from rich.text import Text

from m2flow.observe.formatting import clock, number, percent, seconds
from m2flow.observe.jsonl import encode
from m2flow.observe.record import ACCURACY, EVALUATION, LOSS, as_number

Figures: TypeAlias = Mapping[str, float]

SECONDS_BETWEEN_LINES = 2.0
"""The least time between two plain lines of one phase."""


def _let_go_of(stream: TextIO | IO[str]) -> None:
    """Have what is still written to a stream go nowhere, since nobody reads it any more."""
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class _Terminal(Console):
    """A console whose run goes on when whoever reads it has gone."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _let_go_of(self.file)


class _Bars(RedrawnProgress):
    """One line for each phase, and below them the figures of the one that runs."""

    figures: Mapping[str, float] = {}

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text("  ".join(figures(self.figures)))


class Progress:
    """Shows nothing of a run; what shows something derives from it.

    A context manager, so that whatever was opened is closed.
    """

    def start(self, header: str) -> None:
        """Say what is about to run, at once; phases may follow."""

    def phase(self, name: str, total: int | None = None, completed: int = 0) -> None:
        """Begin a phase, or come back to one of that name.

        Args:
            name: `warm-up`, `training`, `evaluation`, ...
            total: its number of steps, if that is known.
            completed: steps done before, in a run that is resumed.
        """

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Report that `step` of the phase is done; figures not brought keep their last value."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of a training step as they go to `metrics.jsonl`."""

    def note(self, text: str) -> None:
        """Write a line of its own."""

    def close(self) -> None:
        """Release the terminal or stream; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()


class Quiet(Progress):
    """Prints the run directory when the run is done, and nothing before."""

    def done(self, first: Figures, last: Figures, run_dir: Path | str) -> None:
        """Say where a finished run lies; as `summary`."""
        print(run_dir)


class JsonLines(Progress):
    """Writes one JSON object a line, each with its `event`, flushed at once.

    `start` (`run`), `phase` (`name`, `total`, `completed`), `note` (`text`), `step` (`step`,
    `metrics`), and last `end` (`outcome`: `done` with `run_dir`, `first` and `last`, or `failed` or
    `interrupted` with `error`). A figure that is not finite is null.

    Args:
        stream: where to write; standard output as it is now if None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream

    def start(self, header: str) -> None:
        self._write("start", run=header)

    def phase(self, name: str, total: int | None = None, completed: int = 0) -> None:
        self._write("phase", name=name, total=total, completed=completed)

    def note(self, text: str) -> None:
        self._write("note", text=text)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("step", step=step, metrics=metrics)

    def done(self, first: Figures, last: Figures, run_dir: Path | str) -> None:
        """Say where a finished run lies, and of each figure the first value and the last."""
        self._write("end", outcome="done", run_dir=str(run_dir), first=first, last=last)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            outcome = "failed" if isinstance(error, Exception) else "interrupted"
            self._write("end", outcome=outcome, error=f"{type(error).__name__}: {error}")

    def _write(self, event: str, **content: object) -> None:
        try:
            self._stream.write(encode({"event": event, **content}).decode() + "\n")
            self._stream.flush()
        except BrokenPipeError:
            _let_go_of(self._stream)


class TrainProgress(Progress):
    """Shows a run's progress to a person.

    Args:
        console: where to write; standard output if None.
        live: redraw in place; None means if the console is a terminal.
        now: a clock in seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._last_line = float("-inf")
        self._unsaid = False
        self._metrics: dict[str, float] = {}
        self._console = console or _Terminal(file=sys.stdout, highlight=False)
        self._live = self._console.is_terminal if live is None else live
        self._bars = _Bars(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=28 if self._console.width >= 80 else 14),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self._console,
            get_time=now,
            refresh_per_second=4,
            speed_estimate_period=float("inf"),  # a step may take minutes
        )

    def start(self, header: str) -> None:
        self._print(Text(header, style="bold"))
        if self._live:
            self._bars.start()

    def phase(self, name: str, total: int | None = None, completed: int = 0) -> None:
        self._say_last()
        for task in self._bars.tasks:
            self._bars.stop_task(task.id)
            if task.description == name:
                self._bars.remove_task(task.id)
        self._bars.add_task(name, total=total, completed=completed)
        self._last_line, self._metrics = float("-inf"), {}
        if not self._live:
            what = f"{total:,} steps" if total is not None else "begins"
            self._print(Text(f"{name:<10} {what}" + (f", {completed:,} done" if completed else "")))

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        assert self._bars.tasks, "update before phase"
        task, metrics = self._bars.tasks[-1], metrics or {}
        self._metrics.update(metrics)
        self._bars.figures = self._metrics
        self._bars.update(task.id, completed=step)
        if self._live:
            return
        now = self._now()
        weighty = step == task.total or any(key in metrics for key in EVALUATION)
        self._unsaid = not (weighty or now - self._last_line >= SECONDS_BETWEEN_LINES)
        if not self._unsaid:
            self._last_line = now
            self._say(task)

    def note(self, text: str) -> None:
        self._print(Text(text))

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back; may be called again."""
        self._say_last()
        if self._bars.live.is_started:
            self._bars.stop()

    def _say(self, task: Task) -> None:
        left, total = task.time_remaining, task.total
        time_left = f"{clock(left)} left" if left else ""
        count = f"{task.completed:,.0f}" + (f"/{total:,.0f}" if total is not None else "")
        parts = [f"{task.description:<10} {count:>11}", f"{time_left:>10}"]
        self._print(Text("  ".join([*parts, *figures(self._metrics)]).rstrip()))

    def _say_last(self) -> None:
        """Write the newest update of the phase if no line has told of it."""
        if self._unsaid:
            self._unsaid = False
            self._say(self._bars.tasks[-1])

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._live, highlight=False)
        self._console.file.flush()


def figures(metrics: Mapping[str, float]) -> list[str]:
    """The few figures that fit on a line, the weightiest first."""
    shown = []
    for keys, name, form in (
        (EVALUATION, "held-out", percent),
        (("reward/mean",), "reward", number),
        (ACCURACY, "", percent),
        (LOSS, "loss", number),
        (("throughput/tokens_per_s",), "tokens/s", number),
        (("seconds/step",), "step", seconds),
    ):
        value = _first(metrics, keys)
        if value is not None:
            shown.append(f"{name or _what(metrics, keys)} {form(value)}")
    return shown


AVERAGED = ("reward/mean", *ACCURACY, "throughput/tokens_per_s")
"""Figures that differ from step to step: one step alone tells little of where a run has come."""


def summary(
    metrics_first: Mapping[str, float],
    metrics_last: Mapping[str, float],
    run_dir: Path | str,
    window: int = 1,
    taken: float | None = None,
) -> str:
    """The closing words of a run: what changed from the first figures to the last, and where.

    Args:
        metrics_first, metrics_last: figures by key; `step` and `time` (seconds) if known.
        run_dir: the run directory.
        window: of how many steps the figures in `AVERAGED` are means.
        taken: seconds of the run; None: from the first figures to the last.
    """
    of = f"  (means of {window} steps)" if window > 1 else ""
    step, begin, end = (
        as_number(metrics_last.get("step")),
        as_number(metrics_first.get("time")),
        as_number(metrics_last.get("time")),
    )
    head = f"Done: {step:,.0f} steps" if step is not None else "Done"
    if taken is None and begin is not None and end is not None:
        taken = end - begin
    if taken is not None and taken > 0:
        head += f" in {seconds(taken)}"
    lines = [head + "."]
    for keys, name, form in (
        (EVALUATION, f"held-out {_what(metrics_last, EVALUATION)}", percent),
        (("reward/mean",), "reward", number),
        (ACCURACY, f"{_what(metrics_last, ACCURACY)} in training", percent),
    ):
        before, after = _first(metrics_first, keys), _first(metrics_last, keys)
        if after is not None:
            change = form(after) if before is None else f"{form(before)} -> {form(after)}"
            lines.append(f"  {name:<21} {change}{of if keys != EVALUATION else ''}")
    speed = as_number(metrics_last.get("throughput/tokens_per_s"))
    if speed is not None:
        lines.append(f"  {'throughput':<21} {number(speed)} tokens/s")
    lines.append(f"  {'run directory':<21} {Path(run_dir)}")
    return "\n".join(lines)


def _what(metrics: Mapping[str, float], keys: Sequence[str]) -> str:
    """Return what the first key with a value counts: accuracy, or success."""
    key = next((key for key in keys if key in metrics), keys[0])
    return next(part for part in key.split("/") if part not in ("eval", "mean"))


def _first(metrics: Mapping[str, float], keys: Sequence[str]) -> float | None:
    """The figure of the first of the keys that is there."""
    return next((as_number(metrics[key]) for key in keys if key in metrics), None)
