"""Progress: readable logs at a bounded rate, a live view on a terminal, honest time left."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from m2flow.observe.progress import JsonLines, Progress, TrainProgress, figures, summary
from m2flow.observe.record import seconds_taken


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Log(io.StringIO):
    """Counts flushes."""

    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def plain(clock: Clock) -> tuple[TrainProgress, Log]:
    log = Log()
    return TrainProgress(Console(file=log, width=40), now=clock), log


def test_the_first_line_is_there_at_once_and_whole() -> None:
    progress, log = plain(Clock())
    progress.start("m2flow train [recipe]: a header that is longer than forty columns")
    assert log.getvalue() == "m2flow train [recipe]: a header that is longer than forty columns\n"
    assert log.flushes >= 1


def test_plain_lines_come_at_a_bounded_rate_but_the_last_is_never_missed() -> None:
    clock = Clock()
    progress, log = plain(clock)
    progress.phase("training", 80)
    for step in range(1, 61):
        clock.now += 0.1
        progress.update(step, {"reward/mean": step / 100})
    progress.close()
    lines = log.getvalue().splitlines()
    assert lines[0] == "training   80 steps"
    assert [line.split()[1] for line in lines[1:]] == ["1/80", "21/80", "41/80", "60/80"]
    assert lines[2] == "training         21/80   0:06 left  reward 0.21"
    progress.close()
    assert log.getvalue().splitlines() == lines


class Unread(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("shown", [TrainProgress, JsonLines])
def test_a_run_goes_on_when_its_reader_has_gone(
    shown: Callable[[], Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Unread())
    with shown() as progress:
        progress.start("a run")
        progress.phase("training", 2)
        for step in (1, 2):
            progress.update(step, {"reward/mean": 0.5})
            progress.note("a line")


def test_a_run_whose_output_is_cut_short_is_whole(tmp_path: Path) -> None:
    """As `m2flow train ... | head -1` cuts it."""
    program = tmp_path / "run.py"
    program.write_text(
        "import pathlib, sys, time\n"
        "from m2flow.observe.progress import JsonLines, TrainProgress\n"
        "for shown in (TrainProgress, JsonLines):\n"
        "    with shown() as progress:\n"
        "        progress.phase('training', 200)\n"
        "        for number in range(200):\n"
        "            progress.note('a line that takes some room ' * 20)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
    )
    done = tmp_path / "done"
    command = f"{sys.executable} {program} {done} | head -1"
    ran = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], check=False, capture_output=True
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert done.exists()


def test_evaluations_and_ends_of_phases_are_always_told() -> None:
    clock = Clock()
    progress, log = plain(clock)
    progress.phase("training", 3)
    progress.update(0, {"eval/accuracy": 0.47})
    progress.update(1, {"reward/mean": 0.4})
    progress.update(2, {"reward/mean": 0.5, "eval/accuracy": 0.6})
    progress.update(3, {"reward/mean": 0.6})
    told = [line.split()[1] for line in log.getvalue().splitlines()[1:]]
    assert told == ["0/3", "2/3", "3/3"]


def test_time_left_of_a_resumed_run_counts_its_own_steps_only() -> None:
    clock = Clock()
    progress, log = plain(clock)
    progress.phase("training", 100, completed=50)
    for step, clock.now in ((60, 10.0), (70, 20.0)):
        progress.update(step)
    assert "50 done" in log.getvalue()
    assert "0:30 left" in log.getvalue()


def test_markup_in_texts_is_printed_as_it_is() -> None:
    progress, log = plain(Clock())
    progress.note("saved [bold]x[/bold] [/]")
    assert log.getvalue() == "saved [bold]x[/bold] [/]\n"


def test_a_terminal_gets_a_view_that_is_left_in_order() -> None:
    log = io.StringIO()
    console = Console(file=log, width=100, force_terminal=True, color_system=None)

    def fail_on_the_way() -> None:
        with TrainProgress(console, now=Clock()) as progress:
            progress.start("header")
            progress.phase("warm-up", 10)
            progress.update(10, {"loss/total": 0.02})
            progress.phase("training", 80)
            progress.update(4, {"reward/mean": 0.5})
            progress.note("a note")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_on_the_way()
    shown = log.getvalue()
    assert "a note" in shown
    last_view = shown[shown.rindex("warm-up") :]
    assert "10/10" in last_view
    assert "4/80" in last_view
    assert "reward 0.5" in last_view
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_phase_that_comes_back_has_one_line() -> None:
    log = io.StringIO()
    console = Console(file=log, width=100, force_terminal=True, color_system=None)
    with TrainProgress(console, now=Clock()) as progress:
        progress.start("header")
        for name in ("training", "evaluation", "training"):
            progress.phase(name, 5)
        progress.update(1)
    last_view = log.getvalue().rsplit("\x1b[2K", 1)[-1]
    assert last_view.count("training") == 1


def test_figures_are_few_and_in_order() -> None:
    metrics = {
        "seconds/step": 0.41,
        "throughput/tokens_per_s": 28123.0,
        "accuracy/mean": 0.5,
        "reward/mean": 0.512,
        "version": 3,
    }
    shown = ["reward 0.512", "accuracy 50 %", "tokens/s 28.1k", "step 410 ms"]
    assert figures(metrics) == shown


def test_the_summary_says_what_changed_and_where_to_look() -> None:
    first = {"step": 0, "time": 100.0, "eval/accuracy": 0.47}
    last = {"step": 80, "time": 141.2, "eval/accuracy": 0.98, "reward/mean": 0.91}
    text = summary(first, last, "runs/x")
    assert text.splitlines() == [
        "Done: 80 steps in 41.2 s.",
        "  held-out accuracy     47 % -> 98 %",
        "  reward                0.91",
        "  run directory         runs/x",
    ]
    averaged = summary(first, last, "runs/x", window=8).splitlines()
    assert averaged[1:3] == [text.splitlines()[1], f"{text.splitlines()[2]}  (means of 8 steps)"]


def test_a_run_took_the_seconds_of_its_steps_and_evaluations() -> None:
    """The time of its rows left the first step out, and counted the pause before a resumption."""
    rows: list[dict[str, float]] = [
        {"step": 1, "time": 110.0, "seconds/step": 10.0},
        {"step": 2, "time": 125.0, "seconds/step": 11.0, "eval/seconds": 4.0},
        {"step": 3, "time": 9000.0, "seconds/step": 12.0},
    ]
    assert seconds_taken(rows) == 37.0
    head = summary(rows[0], rows[-1], "runs/x", taken=seconds_taken(rows)).splitlines()[0]
    assert head == "Done: 3 steps in 37 s."
    assert seconds_taken([{"step": row["step"], "time": row["time"]} for row in rows]) == 8890.0
    assert seconds_taken([{"step": 0, "time": 1.0}]) is None
