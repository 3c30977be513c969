"""Lanes that are killed while the quick start trains: how soon the run is at work again.

Whole commands, `m2flow train` on two lanes, from a model that is already there. A run that is
disturbed has the process of a lane killed (SIGKILL) after every tenth step; which lane, a seed
says. It ends with all steps done. A spare process waits, as by default, or does not
(`spare_lanes=0`). Beside them stand runs that nobody disturbs, in turn, twice under two names,
which is the noise floor. Seconds are told as:

* back: from the kill to the time at which the next step that had not been done before could begin,
  steps that are taken again included: the end of that step, less what a step takes undisturbed;
* effective: the share of a run's time that its steps would have taken undisturbed, which is as many
  times its own median step that nothing has disturbed, over the same share of runs that nobody
  disturbs; so runs may be faster or slower than each other. Of the quick start's steps, a third of
  a second long, and of steps with eight times as many prompts, which still are far shorter than
  those of models that people use;
* snapshots: what they add to a step, by blocks of steps of one run (`blocks`); and the share of the
  time of runs that nobody disturbs in which a snapshot held a lane up.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from blocks import CYCLE, compare
from blocks import QUICK_STEPS as QUICK_BLOCKED_STEPS
from harness import ROOT, Target, arguments, conclude, table
from starting_point import quickstart

from m2flow.observe.jsonl import read_rows

STEPS, QUICK_STEPS = 60, 20
EVERY = 10
"""A lane is killed once in so many steps."""

TIMES = 3
LIMIT_SECONDS = 900.0
BLOCKED_LIMIT_SECONDS = 5400.0
"""Longest that the run of blocks may take, whose 2,800 steps take half a second each."""

POLL_SECONDS = 0.005

BLOCKED_STEPS = 100 * CYCLE
"""Of the run that tells what snapshots add; fewer do not tell 1 % from 2 % (decision 0119)."""

LONG_STEPS, LONG_TIMES = 30, 2
LONG = ("prompts_per_step=256",)
"""Of the runs with longer steps, which are too many for `--quick`."""

UNDISTURBED, TWIN = "undisturbed", "undisturbed, twin"
KILLED, SPARED = "lanes killed", "lanes killed, a spare"
LONG_UNDISTURBED, LONG_TWIN = "long steps", "long steps, twin"
LONG_KILLED, LONG_SPARED = "long steps, lanes killed", "long steps, lanes killed, a spare"
NO_SPARE = "spare_lanes=0"
RUNS: Mapping[str, tuple[str, ...]] = {
    UNDISTURBED: (),
    KILLED: (NO_SPARE,),
    TWIN: (),
    SPARED: (),
}
LONG_RUNS: Mapping[str, tuple[str, ...]] = {
    LONG_UNDISTURBED: LONG,
    LONG_KILLED: (*LONG, NO_SPARE),
    LONG_TWIN: LONG,
    LONG_SPARED: LONG,
}
"""What differs, in the order in which they take turns."""


@dataclass
class Seen:
    """One run.

    Attributes:
        training: seconds from the end of the first step to that of the last one.
        step: median seconds of a step that nothing has disturbed.
        steps: that the former seconds are of.
        snapshots: seconds of the former for which snapshots held a lane up.
        back: of each kill, seconds until new work could begin.
    """

    training: float
    step: float
    steps: int
    snapshots: float
    back: list[float] = field(default_factory=list)


def main() -> None:
    options = _options()
    _, _, source = quickstart()
    runs: dict[str, list[Seen]] = defaultdict(list)
    turns = [(name, turn) for turn in range(options.times) for name in RUNS]
    if not options.quick:
        turns += [(name, turn) for turn in range(LONG_TIMES) for name in LONG_RUNS]
    with tempfile.TemporaryDirectory(prefix="m2flow-recovery-") as folder:
        for name, turn in turns:
            where = Path(folder) / f"{name.replace(' ', '-')}-{turn}"
            steps = LONG_STEPS if name in LONG_RUNS else options.steps
            command = _command(name, source.path, where, options.mode, steps)
            seen = _run(command, where, turn, steps if "killed" in name else 0)
            runs[name].append(seen)
            print(f"  {name}: {seen.training:.1f} s", flush=True)
        blocks = _blocks(source.path, Path(folder) / "blocks", options)
    _report(runs)
    found = {**_figures(runs), "blocks": blocks}
    conclude("recovery", found, [*_targets(runs), *_targets_of_blocks(blocks)], options)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--mode", default="disaggregated", help="of the runs")
    options = parser.parse_args()
    options.steps = QUICK_STEPS if options.quick else STEPS
    options.times = 1 if options.quick else TIMES
    options.blocked_steps = QUICK_BLOCKED_STEPS if options.quick else BLOCKED_STEPS
    return options


def _command(
    name: str,
    model: str | Path,
    folder: Path,
    mode: str,
    steps: int,
    program: Sequence[str] = ("-m", "m2flow"),
) -> list[str]:
    return [
        *(sys.executable, *program, "train", str(ROOT / "recipes" / "quickstart.yaml")),
        *("--mode", mode, "--run-dir", str(folder), "lanes=cpu:2", f"model.path={model}"),
        *("warmup.steps=0", f"steps={steps}", f"evaluation.every={steps}"),
        *("lane_restarts=99", *{**RUNS, **LONG_RUNS}[name]),
    ]


# --- measuring ------------------------------------------------------------------------------------


def _run(
    command: list[str], folder: Path, seed: int, steps: int, limit: float = LIMIT_SECONDS
) -> Seen:
    """Carry a command out in `limit` seconds; lanes are killed while it takes so many steps."""
    choice, killed_at, rows, read = random.Random(seed), list[float](), 0, 0
    due = list(range(EVERY // 2, steps, EVERY))
    file = folder / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + limit
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"not done within {limit:g} s: {' '.join(command)}")
            if file.exists() and file.stat().st_size > read:
                with file.open("rb") as lines:
                    lines.seek(read)
                    new = lines.read()
                rows, read = rows + new.count(b"\n"), read + len(new)
            if due and rows > due[0]:
                due.pop(0)
                victim = choice.choice(_lanes(process.pid))
                killed_at.append(time.time())
                os.kill(victim, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        assert process.stderr is not None
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr.read().decode()}")
    return _seen([row for row in read_rows(file).rows if row["step"]], killed_at)


def _lanes(process: int) -> list[int]:
    """The processes of the lanes that are in use, in order of number."""
    every = psutil.Process(process).children(recursive=True)
    lanes = [one for one in every if "ray::LaneProcess.serve" in " ".join(one.cmdline())]
    return sorted(one.pid for one in lanes)


def _seen(rows: Sequence[Mapping[str, Any]], killed_at: Sequence[float]) -> Seen:
    pairs = list(pairwise(rows))
    losses = "lanes/restarts"
    disturbed = [after for before, after in pairs if after[losses] > before[losses]]
    if len(disturbed) != len(killed_at):
        raise RuntimeError(f"{len(killed_at)} lanes were killed, {len(disturbed)} came back")
    calm = [b["time"] - a["time"] for a, b in pairs if a[losses] == b[losses]]
    step = statistics.median(calm)
    back = [row["time"] - step - at for row, at in zip(disturbed, killed_at, strict=True)]
    busy = "snapshots/seconds"
    seconds = rows[-1]["time"] - rows[0]["time"]
    return Seen(seconds, step, len(pairs), rows[-1][busy] - rows[0][busy], back)


def _blocks(model: str | Path, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """What snapshots add to a step, as a share of it."""
    program = (str(ROOT / "benchmarks" / "snapshot_blocks.py"),)
    _run(
        _command(UNDISTURBED, model, folder, options.mode, options.blocked_steps, program),
        folder,
        seed=0,
        steps=0,
        limit=BLOCKED_LIMIT_SECONDS,
    )
    return compare([row for row in read_rows(folder / "metrics.jsonl").rows if row["step"]])


# --- the result -----------------------------------------------------------------------------------


def _training(runs: Sequence[Seen]) -> float:
    return statistics.median(run.training for run in runs)


def _calm(*kinds: Sequence[Seen]) -> float:
    """The share of runs' time that their steps would take if each were their median calm one."""
    runs = [run for some in kinds for run in some]
    return statistics.median(run.steps * run.step / run.training for run in runs)


def _report(runs: Mapping[str, list[Seen]]) -> None:
    table(
        ["run", "s of all steps", "each", "ms/step", "s until back"],
        [
            [
                name,
                _training(some),
                " ".join(f"{one.training:.1f}" for one in some),
                1e3 * statistics.median(one.step for one in some),
                " ".join(f"{seconds:.1f}" for one in some for seconds in one.back) or "-",
            ]
            for name, some in runs.items()
        ],
    )


def _figures(runs: Mapping[str, list[Seen]]) -> dict[str, Any]:
    return {name: [asdict(one) for one in some] for name, some in runs.items()}


def _targets(runs: Mapping[str, list[Seen]]) -> list[Target]:
    back = {name: [s for one in runs[name] for s in one.back] for name in (KILLED, SPARED)}
    floor = abs(_calm(runs[TWIN]) / _calm(runs[UNDISTURBED]) - 1)
    print(f"noise floor, undisturbed twice: {floor:.1%}")
    both = [*runs[UNDISTURBED], *runs[TWIN]]
    busy = sum(one.snapshots for one in both) / sum(one.training for one in both)
    targets = [
        Target("seconds until back, the longest", max(back[KILLED]), 10.0, at_most=True),
        Target(
            "seconds until back with a spare, the longest", max(back[SPARED]), 3.0, at_most=True
        ),
        Target("snapshots, share of time in which one held a lane up", busy, 0.02, at_most=True),
    ]
    disturbed = {
        "a tenth of the steps disturbed": (KILLED, UNDISTURBED, TWIN),
        "a tenth of the steps disturbed, with a spare": (SPARED, UNDISTURBED, TWIN),
        "a tenth of long steps disturbed": (LONG_KILLED, LONG_UNDISTURBED, LONG_TWIN),
        "a tenth of long steps disturbed, with a spare": (LONG_SPARED, LONG_UNDISTURBED, LONG_TWIN),
    }
    return targets + [
        Target(
            f"effective time at {name}",
            _calm(runs[killed]) / _calm(runs[calm], runs[twin]),
            0.9,
        )
        for name, (killed, calm, twin) in disturbed.items()
        if runs[killed]
    ]


def _targets_of_blocks(blocks: Mapping[str, float]) -> list[Target]:
    print(f"noise floor, blocks of the same kinds: {blocks['the same twice']:.1%}")
    print(f"standard error of what snapshots add: {blocks['standard error']:.1%}")
    return [Target("snapshots, share of a step", blocks["cost"], 0.02, at_most=True)]


if __name__ == "__main__":
    main()
