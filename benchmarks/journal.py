"""What keeping rollouts on disk costs a step of the quick start, and what a resume gains by it.

Whole commands, `m2flow train` on two lanes, from a model that is already there. One run keeps its
rollouts in every other block of steps (`blocks`). Runs as they are by default take turns with runs
that neither keep rollouts nor can heal: what these are faster by is the journal and all that
healing takes, such as snapshots and leases; they stand under two names, which is the noise floor.
Then a run is killed (SIGKILL) late in its steps, with no checkpoint, and goes on from a copy of its
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
from blocks import QUICK_STEPS as QUICK_BLOCKED_STEPS
from blocks import STEPS as BLOCKED_STEPS
from blocks import compare
from harness import ROOT, Target, arguments, conclude, table
from starting_point import quickstart

from m2flow.observe.jsonl import read_rows
from m2flow.runtime.lane.frames import read_frames
from m2flow.runtime.lane.journal import JournalPlace, JournalWriter

STEPS, QUICK_STEPS = 60, 20
TIMES = 6
SKIPPED = 3
"""First steps, which are left out."""

LIMIT_SECONDS = 1800.0
WITH, WITHOUT = "with", "without"
HEALING, NOTHING, TWIN = "as by default", "no journal, no healing", "no journal, no healing, twin"
NO_JOURNAL = "journal_gb=0"
RUNS: Mapping[str, tuple[str, ...]] = {
    HEALING: (),
    NOTHING: (NO_JOURNAL, "lane_restarts=0"),
    TWIN: (NO_JOURNAL, "lane_restarts=0"),
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
        blocks = _blocks(source.path, Path(folder) / "blocks", options)
    _report(steps)
    print(f"where it was again: with a journal {again[WITH]:.1f} s, without {again[WITHOUT]:.1f} s")
    print(f"writing takes {1e3 * written:.2f} ms of a processor's time a step")
    print(f"blocks: the same twice {blocks['the same twice']:.2%}, standard error of the journal's "
          f"share {blocks['standard error']:.2%}")  # fmt: skip
    rest = [statistics.fmean(pair) for pair in zip(steps[NOTHING], steps[TWIN], strict=True)]
    floor = abs(_mean(steps[TWIN]) / _mean(steps[NOTHING]) - 1)
    healing = _mean(steps[HEALING]) / _mean(rest) - 1
    error = _error([one / other for one, other in zip(steps[HEALING], rest, strict=True)])
    print(f"runs: the same twice {floor:.2%}, standard error of healing's share {error:.2%}")
    results: dict[str, Any] = {
        "steps": steps, "again": again, "written": written, "blocks": blocks,
        "healing": {"cost": healing, "the same twice": floor, "standard error": error},
    }  # fmt: skip
    conclude(
        "journal",
        results,
        [
            Target("journal, share of a step", blocks["cost"], 0.03, at_most=True),
            Target("journal and healing, share of a step less two errors", healing - 2 * error,
                   0.03, at_most=True),
            Target("writing, processor's share of a step", written / _mean(steps[HEALING]), 0.02,
                   at_most=True),
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
    options.times = options.times or (2 if options.quick else TIMES)
    options.times = max(2, options.times)  # of one there is no error
    options.blocked_steps = QUICK_BLOCKED_STEPS if options.quick else BLOCKED_STEPS
    return options


def _command(
    model: str | Path,
    folder: Path,
    options: argparse.Namespace,
    *more: str,
    program: Sequence[str] = ("-m", "m2flow"),
) -> list[str]:
    return [
        *(sys.executable, *program, "train", str(ROOT / "recipes" / "quickstart.yaml")),
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
    for name, more in ((WITH, ()), (WITHOUT, (NO_JOURNAL,))):
        where = folder / name
        shutil.copytree(killed, where, symlinks=True)
        _carry_out([*_command(model, where, options, *more), "--resume"])
        found[name] = sum(row["seconds/step"] for row in _rows(where)[:done])
    return found


def _blocks(model: str | Path, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """What keeping rollouts adds to a step, as a share of it."""
    program = (str(ROOT / "benchmarks" / "journal_blocks.py"),)
    more = (f"steps={options.blocked_steps}",)
    _carry_out(_command(model, folder, options, *more, program=program))
    return compare(_rows(folder))


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
    return statistics.fmean(values)


def _error(values: Sequence[float]) -> float:
    """Standard error of a mean."""
    return statistics.stdev(values) / len(values) ** 0.5


def _report(steps: Mapping[str, Sequence[float]]) -> None:
    table(
        ["runs", "ms/step", "each"],
        [
            [name, 1e3 * _mean(some), " ".join(f"{1e3 * one:.1f}" for one in some)]
            for name, some in steps.items()
        ],
    )


if __name__ == "__main__":
    main()
