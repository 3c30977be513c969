"""What a person sees while a run goes on: a live view on a terminal, plain lines elsewhere.

Promises: something appears at once; on a terminal one line is redrawn per phase, in a log one line
is written at most every `seconds_between_lines`, flushed, besides the first and last line of a
phase and every evaluation. Takes metrics by their keys in `metrics.jsonl`; knows no workload.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from m2flow.observe.formatting import clock, number, percent, seconds
from m2flow.observe.record import ACCURACY, EVALUATION, LOSS, as_number

SPEED_WINDOW = 30
"""Updates over which the speed, and so the time left, is measured."""


class Phase:
    """How far a part of a run has come; knows the time left from the latest updates."""

    def __init__(self, name: str, total: int | None, completed: int, now: float) -> None:
        self.name, self.total, self.completed = name, total, completed
        self.started, self.ended = now, now
        self.metrics: dict[str, float] = {}
        self._marks: deque[tuple[int, float]] = deque([(completed, now)], maxlen=SPEED_WINDOW)

    def advance(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Take in that `step` is done; figures it does not bring keep their last value."""
        self.completed, self.ended = step, now
        self.metrics.update(metrics)
        self._marks.append((step, now))

    @property
    def is_complete(self) -> bool:
        return self.total is not None and self.completed >= self.total

    @property
    def seconds_left(self) -> float | None:
        """None before the second update, or where the total is not known."""
        (first, begin), (last, end) = self._marks[0], self._marks[-1]
        if self.total is None or last <= first or end <= begin:
            return None
        return (self.total - self.completed) * (end - begin) / (last - first)

    @property
    def seconds_spent(self) -> float:
        return self.ended - self.started

    @property
    def count(self) -> str:
        return f"{self.completed:,}" + (f"/{self.total:,}" if self.total is not None else "")


class TrainProgress:
    """Shows a run's progress; a context manager, so that the terminal is left in order.

    Args:
        console: where to write; standard output if None.
        live: redraw in place; None means if the console is a terminal.
        seconds_between_lines: the least time between two plain lines of one phase.
        now: a clock in seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        seconds_between_lines: float = 2.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._between = seconds_between_lines
        self._now = now
        self._last_line = float("-inf")
        self._unsaid = False
        self._phases: list[Phase] = []
        self._console = console or Console(file=sys.stdout, highlight=False)
        wants_live = self._console.is_terminal if live is None else live
        self._live: Live | None = None
        if wants_live:
            self._live = Live(
                console=self._console, get_renderable=self._view, refresh_per_second=4
            )

    def start(self, header: str) -> None:
        """Say what is about to run, at once; phases may follow."""
        self._print(Text(header, style="bold"))
        if self._live is not None:
            self._live.start()

    def phase(self, name: str, total: int | None = None, completed: int = 0) -> None:
        """Begin a phase, or come back to one of that name.

        Args:
            name: `warm-up`, `training`, `evaluation`, ...
            total: its number of steps, if that is known.
            completed: steps done before, in a run that is resumed.
        """
        self._say_last()
        self._phases = [phase for phase in self._phases if phase.name != name]
        self._phases.append(Phase(name, total, completed, self._now()))
        self._last_line = float("-inf")
        if self._live is None:
            what = f"{total:,} steps" if total is not None else "begins"
            self._print(Text(f"{name:<10} {what}" + (f", {completed:,} done" if completed else "")))

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Report that `step` of the phase is done, with its figures."""
        assert self._phases, "update before phase"
        phase, now = self._phases[-1], self._now()
        metrics = metrics or {}
        phase.advance(step, metrics, now)
        if self._live is not None:
            return
        weighty = phase.is_complete or any(key in metrics for key in EVALUATION)
        self._unsaid = not (weighty or now - self._last_line >= self._between)
        if not self._unsaid:
            self._last_line = now
            self._say(phase)

    def note(self, text: str) -> None:
        """Write a line of its own."""
        self._print(Text(text))

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back; may be called again."""
        self._say_last()
        if self._live is not None and self._live.is_started:
            self._live.refresh()
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _say(self, phase: Phase) -> None:
        left = phase.seconds_left
        time_left = f"{clock(left)} left" if left else ""
        parts = [f"{phase.name:<10} {phase.count:>11}", f"{time_left:>10}"]
        self._print(Text("  ".join([*parts, *figures(phase.metrics)]).rstrip()))

    def _say_last(self) -> None:
        """Write the newest update of the phase if no line has told of it."""
        if self._unsaid:
            self._unsaid = False
            self._say(self._phases[-1])

    def _print(self, text: Text) -> None:
        soft = self._live is None
        self._console.print(text, soft_wrap=soft, highlight=False)
        self._console.file.flush()

    def _view(self) -> Group:
        """One line for each phase, and below them the figures of the one that runs."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        for phase in self._phases:
            runs = phase is self._phases[-1] and not phase.is_complete
            left = phase.seconds_left
            time_text = f"{clock(left)} left" if runs and left else clock(phase.seconds_spent)
            grid.add_row(
                Text(f"{phase.name:<10}", style="bold" if runs else "dim"),
                _bar(phase, 28 if self._console.width >= 80 else 14),
                Text(f"{phase.count:>9}"),
                Text(f"{time_text:<9}", style="cyan" if runs else "dim"),
            )
        shown = figures(self._phases[-1].metrics) if self._phases else []
        return Group(grid, Text("  ".join(shown))) if shown else Group(grid)


def figures(metrics: Mapping[str, float]) -> list[str]:
    """The few figures that fit on a line, the weightiest first."""
    shown = []
    for keys, name, form in (
        (EVALUATION, "held-out", percent),
        (("reward/mean",), "reward", number),
        (ACCURACY, "accuracy", percent),
        (LOSS, "loss", number),
        (("throughput/tokens_per_s",), "tokens/s", number),
        (("seconds/step",), "step", seconds),
    ):
        value = next((as_number(metrics[key]) for key in keys if key in metrics), None)
        if value is not None:
            shown.append(f"{name} {form(value)}")
    return shown


def summary(
    metrics_first: Mapping[str, float], metrics_last: Mapping[str, float], run_dir: Path | str
) -> str:
    """The closing words of a run: what changed from the first figures to the last, and where.

    Args:
        metrics_first, metrics_last: figures by key; `step` and `time` (seconds) if known.
        run_dir: the run directory.
    """
    step, begin, end = (
        as_number(metrics_last.get("step")),
        as_number(metrics_first.get("time")),
        as_number(metrics_last.get("time")),
    )
    head = f"Done: {step:,.0f} steps" if step is not None else "Done"
    if begin is not None and end is not None and end > begin:
        head += f" in {seconds(end - begin)}"
    lines = [head + "."]
    for keys, name, form in (
        (EVALUATION, "held-out accuracy", percent),
        (("reward/mean",), "reward", number),
        (ACCURACY, "accuracy in training", percent),
    ):
        before = next((as_number(metrics_first[key]) for key in keys if key in metrics_first), None)
        after = next((as_number(metrics_last[key]) for key in keys if key in metrics_last), None)
        if after is not None:
            change = form(after) if before is None else f"{form(before)} -> {form(after)}"
            lines.append(f"  {name:<21} {change}")
    speed = as_number(metrics_last.get("throughput/tokens_per_s"))
    if speed is not None:
        lines.append(f"  {'throughput':<21} {number(speed)} tokens/s")
    lines.append(f"  {'run directory':<21} {Path(run_dir)}")
    return "\n".join(lines)


def _bar(phase: Phase, width: int) -> ProgressBar:
    return ProgressBar(
        total=None if phase.total is None else float(phase.total),
        completed=float(phase.completed),
        width=width,
        pulse=phase.total is None,
        complete_style="cyan",
        finished_style="green",
    )
