"""What keeping rollouts on disk costs a step of the quick start, and what a resume gains by it.

Whole commands, `m2flow train` on two lanes, from a model that is already there. Runs with a journal
and runs without take turns; the one without stands under two names, which is the noise floor. A
fourth one cannot heal either: what it is faster by is the journal and all that healing takes. Then
a run is killed (SIGKILL) late in its steps, with no checkpoint, and goes on from a copy of its
directory, with the journal and without. Seconds are told as:

* step: the mean over all steps but the first three, of each run; then the mean over runs;
* again: from the start of training of the resumed run to where the killed one had come;
* written: what writing a step's rollouts once more takes of a processor, in this process.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from harness import ROOT, Target, arguments, conclude, table
from starting_point import quickstart

from m2flow.observe.jsonl import read_rows
from m2flow.runtime.lane.frames import read_frames
from m2flow.runtime.lane.journal import JournalPlace, JournalWriter

STEPS, QUICK_STEPS = 60, 20
TIMES = 6
SKIPPED = 3
"""First steps, which are left out."""

LIMIT_SECONDS = 900.0
WITH, WITHOUT, TWIN = "with", "without", "without, twin"
NOTHING = "without, nor healing"
RUNS: Mapping[str, tuple[str, ...]] = {
    WITH: (),
    WITHOUT: ("journal_gb=0",),
    TWIN: ("journal_gb=0",),
    NOTHING: ("journal_gb=0", "lane_restarts=0"),
}


def main() -> None:
    options = _options()
    _, _, source = quickstart()
    steps: dict[str, list[float]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory(prefix="m2flow-journal-") as folder:
        for turn in range(options.times):
            names = list(RUNS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                where = Path(folder) / f"{turn}-{names.index(name)}"
                _carry_out(_command(source.path, where, options, *RUNS[name]))
                steps[name].append(_seconds_of_step(where))
                print(f"  {name}: {1e3 * steps[name][-1]:.1f} ms/step", flush=True)
        again = _resumed(Path(folder), source.path, options)
        written = _written(Path(folder) / "killed" / "journal", Path(folder) / "written")
    _report(steps, again)
    print(f"writing takes {1e3 * written:.2f} ms of a processor's time a step")
    floor = abs(_mean(steps[TWIN]) / _mean(steps[WITHOUT]) - 1)
    print(f"noise floor, without a journal twice: {floor:.2%}")
    base = _mean([*steps[WITHOUT], *steps[TWIN]])
    cost = _mean(steps[WITH]) / base - 1
    print(f"with it and healing: {_mean(steps[WITH]) / _mean(steps[NOTHING]) - 1:.2%} of a step")
    results: dict[str, Any] = {
        "steps": steps, "again": again, "noise floor": floor, "written": written,
    }  # fmt: skip
    conclude(
        "journal",
        results,
        [
            Target("journal, share of a step", cost, 0.03, at_most=True),
            Target("writing, processor's share of a step", written / base, 0.02, at_most=True),
            Target("a resume with it over one without, seconds", again[WITH] / again[WITHOUT], 0.9,
                   at_most=True),
        ],
        options,
    )  # fmt: skip


def _options() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--mode", default="disaggregated", help="of the runs")
    parser.add_argument("--times", type=int, help="how often each run is made")
    options = parser.parse_args()
    options.steps = QUICK_STEPS if options.quick else STEPS
    options.times = options.times or (1 if options.quick else TIMES)
    return options


def _command(model: str | Path, folder: Path, options: argparse.Namespace, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "m2flow", "train", str(ROOT / "recipes" / "quickstart.yaml")),
        *("--mode", options.mode, "--run-dir", str(folder), "lanes=cpu:2", f"model.path={model}"),
        *("warmup.steps=0", f"steps={options.steps}", "evaluation.problems=0", *more),
    ]


def _carry_out(command: Sequence[str], until: Path | None = None, steps: int = 0) -> None:
    """Carry a command out; or kill it when a file of figures has so many rows."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"not done within {LIMIT_SECONDS:g} s: {' '.join(command)}")
            if until is not None and until.exists() and len(read_rows(until).rows) >= steps:
                family = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                psutil.wait_procs(family, timeout=60)
                return
            time.sleep(0.005)
        assert process.stderr is not None
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr.read().decode()}")


def _resumed(folder: Path, model: str | Path, options: argparse.Namespace) -> dict[str, float]:
    """By name the seconds in which a killed run is where it was."""
    killed, done = folder / "killed", options.steps - 5
    command = _command(model, killed, options, "checkpoint.every=1000")
    _carry_out(command, killed / "metrics.jsonl", done)
    found = {}
    for name in (WITH, WITHOUT):
        where = folder / name
        shutil.copytree(killed, where, symlinks=True)
        _carry_out([*_command(model, where, options, *RUNS[name]), "--resume"])
        found[name] = sum(row["seconds/step"] for row in _rows(where)[:done])
    return found


def _written(journal: Path, folder: Path) -> float:
    """Seconds of a processor that writing the rollouts of a step takes."""
    frames = [one for path in sorted(journal.iterdir()) for one in read_frames(path)]
    writer = JournalWriter(JournalPlace("step", str(folder), 10**12))
    writer.add(frames[0])  # imports
    writer.flush()
    start = time.process_time()
    for one in frames:
        writer.add(one)
    writer.close(LIMIT_SECONDS)
    return (time.process_time() - start) / len({one.step for one in frames})


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl").rows if row["step"]]


def _seconds_of_step(folder: Path) -> float:
    times = [row["time"] for row in _rows(folder)][SKIPPED:]
    return statistics.mean(after - before for before, after in pairwise(times))


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values)


def _report(steps: Mapping[str, Sequence[float]], again: Mapping[str, float]) -> None:
    table(
        ["journal", "ms/step", "each", "s until it was where it was"],
        [
            [
                name,
                1e3 * _mean(some),
                " ".join(f"{1e3 * one:.1f}" for one in some),
                f"{again[name]:.1f}" if name in again else "-",
            ]
            for name, some in steps.items()
        ],
    )


if __name__ == "__main__":
    main()
