"""`auto` as a user meets it: whole commands with nothing stored, against each fixed mode.

Two workloads are recipes and run as `m2flow train RECIPE --mode MODE`; the others, which no recipe
can say, as one process of `auto_run.py`. Every run takes 60 steps, from a model that is already
there, and its seconds are those of the wall from the command to its end: interpreter, cluster,
lanes, evaluations, checkpoints and report included. The runs take turns, twice. `auto` begins with
an empty store each time; `auto, stored` finds what an earlier run of `auto` has left.

The collocated mode runs under two names: the noise floor is the largest difference between any two
of its runs. A target that is missed by less than the floor is missed all the same, and the report
says how large the floor was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, Target, arguments, conclude, table
from starting_point import quickstart

FIXED = ("collocated", "disaggregated", "hybrid")
AGAIN = "collocated, again"
COLD, STORED = "auto", "auto, stored"
RUN = (*FIXED, COLD, AGAIN, STORED)
STEPS, QUICK_STEPS = 60, 24
SETTLED = 20
"""The step from which a run is compared by seconds a step."""

TIMES = 2
"""Each run takes its turn so often."""

LIMIT_SECONDS = 900.0
"""Longest that a run may take."""

Command = Callable[[str, int, Path], list[str]]
"""Mode, steps and folder to the command, which leaves `metrics.jsonl` in the folder."""


@dataclass(frozen=True)
class Whole:
    """One run.

    Attributes:
        seconds: from the command to its end.
        first_step: from the command to the end of the first training step.
        settled: median seconds from one step's end to the next one's, from step SETTLED on.
    """

    seconds: float
    first_step: float
    settled: float


def main() -> None:
    options = _options()
    results = {name: _compared(name, WORKLOADS[name], options) for name in options.workloads}
    conclude("auto", _figures(results), _targets(results), options)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--workloads", help="some of them, by name")
    parser.add_argument("--modes", nargs="+", help="some of the modes; others are left out")
    parser.add_argument("--steps", type=int, help="of each run")
    options = parser.parse_args()
    names = options.workloads or ("quickstart" if options.quick else ",".join(WORKLOADS))
    options.workloads = names.split(",")
    options.steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    options.modes = tuple(options.modes or RUN)
    options.times = 1 if options.quick else TIMES
    return options


# --- commands -------------------------------------------------------------------------------------


def _recipe(recipe: str, mode: str, steps: int, folder: Path) -> list[str]:
    """A recipe from the quick start's model, which is warmed up beforehand."""
    _, _, source = quickstart()
    return [
        *(sys.executable, "-m", "m2flow", "train", str(ROOT / "recipes" / f"{recipe}.yaml")),
        *("--mode", mode, "--run-dir", str(folder), "lanes=cpu:2"),
        *(f"model.path={source.path}", "warmup.steps=0", f"steps={steps}"),
    ]


def _script(workload: str, mode: str, steps: int, folder: Path) -> list[str]:
    folder.mkdir()
    return [
        *(sys.executable, str(Path(__file__).with_name("auto_run.py")), workload, "--mode", mode),
        *("--steps", str(steps), "--metrics", str(folder / "metrics.jsonl")),
    ]


WORKLOADS: dict[str, Command] = {
    "quickstart": partial(_recipe, "quickstart"),
    "ppo": partial(_recipe, "ppo_quickstart"),
    **{name: partial(_script, name) for name in ("long_tail", "judged", "cart_pole")},
}


# --- measuring ------------------------------------------------------------------------------------


def _compared(name: str, command: Command, options: argparse.Namespace) -> dict[str, list[Whole]]:
    """Every mode in turn; a store is begun by `auto` and found by the run after it."""
    quickstart()  # what is slow to make once is no part of a run
    runs: dict[str, list[Whole]] = {mode: [] for mode in options.modes}
    with tempfile.TemporaryDirectory(prefix="m2flow-auto-") as folder:
        for turn in range(options.times):
            cold = Path(folder) / f"cache-{turn}"
            for mode in options.modes:
                store = cold if mode in (COLD, STORED) else Path(folder) / f"none-{turn}"
                where = Path(folder) / f"{mode.replace(', ', '-')}-{turn}"
                asked = {STORED: COLD, AGAIN: FIXED[0]}.get(mode, mode)
                runs[mode].append(_run(command(asked, options.steps, where), where, store))
                print(f"  {name}, {mode}: {runs[mode][-1].seconds:.1f} s", flush=True)
    _report(name, runs)
    return runs


def _run(command: list[str], folder: Path, store: Path) -> Whole:
    environment = {**os.environ, "M2FLOW_CACHE": str(store)}
    start, began = time.time(), time.perf_counter()
    done = subprocess.run(
        command,
        check=False,
        timeout=LIMIT_SECONDS,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends = {row["step"]: row["time"] for row in rows}
    late = [ends[step] - ends[step - 1] for step in ends if step > SETTLED and step - 1 in ends]
    return Whole(seconds, ends[1] - start, statistics.median(late))


# --- the result -----------------------------------------------------------------------------------


def _mean(runs: list[Whole], what: str) -> float:
    return statistics.mean(getattr(run, what) for run in runs)


def _best(runs: Mapping[str, list[Whole]], what: str) -> float:
    """Of the fixed modes."""
    return min(_mean(runs[mode], what) for mode in FIXED if mode in runs)


def _floor(runs: Mapping[str, list[Whole]]) -> float:
    """Largest over least seconds of runs of one plan, less 1."""
    same = [run.seconds for mode in (FIXED[0], AGAIN) for run in runs.get(mode, [])]
    return max(same) / min(same) - 1 if same else 0.0


def _report(name: str, runs: Mapping[str, list[Whole]]) -> None:
    best = _best(runs, "seconds")
    table(
        [name, "s in all", "over best mode", "each", "s to first step", "ms/step settled"],
        [
            [
                mode,
                _mean(some, "seconds"),
                _mean(some, "seconds") / best,
                " ".join(f"{one.seconds:.1f}" for one in some),
                _mean(some, "first_step"),
                1e3 * _mean(some, "settled"),
            ]
            for mode, some in runs.items()
        ],
    )
    print(f"noise floor, the same plan again: {_floor(runs):.1%}\n", flush=True)


def _figures(results: Mapping[str, Mapping[str, list[Whole]]]) -> dict[str, Any]:
    return {
        name: {
            what: {mode: [getattr(one, what) for one in some] for mode, some in runs.items()}
            for what in ("seconds", "first_step", "settled")
        }
        | {"noise_floor": _floor(runs)}
        for name, runs in results.items()
    }


def _targets(results: Mapping[str, Mapping[str, list[Whole]]]) -> list[Target]:
    targets = []
    for name, runs in results.items():
        best = _best(runs, "seconds")
        if COLD in runs:
            mine = runs[COLD]
            what = f"{name}: auto over the best mode, whole run"
            targets.append(Target(what, _mean(mine, "seconds") / best, 1.05, at_most=True))
            what = f"{name}: seconds to the end of the first training step"
            first = max(run.first_step for run in mine)
            targets.append(Target(what, first, 15.0, at_most=True))
            settled = _mean(mine, "settled") / _best(runs, "settled")
            what = f"{name}: auto over the best mode, from step {SETTLED} on"
            targets.append(Target(what, settled, 1.03, at_most=True))
        if STORED in runs:
            what = f"{name}: auto with a stored profile over the best mode, whole run"
            stored = _mean(runs[STORED], "seconds") / best
            targets.append(Target(what, stored, 1.03, at_most=True))
    return targets


if __name__ == "__main__":
    main()
