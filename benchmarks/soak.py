"""A quick start for a long time, with a fault a minute: does anything grow, is anything left?

A whole command, `m2flow train` on two lanes, that would never end: the quick start, or with
`--embodied` that of embodied agents, with its simulators in processes. Once a minute the process of
a lane or of simulators, as a seed says, is killed (SIGKILL): the one that has lived longest. Every
few seconds the launcher and all processes that stem from it are counted, with their memory
(proportional set size), their open files, and the run's files in shared memory. In the end
SIGTERM ends the run with a checkpoint, and what is left is counted.

Growth is the most of the last third of the samples over the most of the second third; the first
third is for warming up. The most, because a lane that has just come back holds nothing yet. Of
files in shared memory, of which there are eight, one more is no growth.
What grows slowly shows in its trend: the straight line through the samples of the last two thirds
that have as many processes as most of them, as a share of their mean in an hour. Lanes hold more
the older they are, and one killed a minute is what the line mostly sees: its standard error, with
samples that resemble their neighbours, is told, and what grows is what grows by two of them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from harness import ROOT, Target, arguments, conclude, table
from starting_point import quickstart

from m2flow.observe.jsonl import read_rows

MINUTES, QUICK_MINUTES = 30.0, 3.0
FAULT_SECONDS = 60.0
SAMPLE_SECONDS = 5.0
END_SECONDS = 90.0
VICTIMS = {"lane": "ray::LaneProcess.serve", "simulator": "m2flow.environments.child"}
"""Who is killed, by what the command line has."""

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Sample:
    """The run at a moment.

    Attributes:
        seconds: since the first step.
        steps: that are done.
        restarts: of lanes.
        processes: of the run, the launcher included.
        launcher_mb: what it has for itself, 10**6 bytes, without files in shared memory: those are
            counted by themselves, and become its own as soon as the lane beside it is gone.
        all_mb: proportional set size of all.
        launcher_handles, all_handles: open files.
        handles: those of all, by name of the process.
        segments, segments_mb: files in shared memory.
    """

    seconds: float
    steps: int
    restarts: int
    processes: int
    launcher_mb: float
    all_mb: float
    launcher_handles: int
    all_handles: int
    segments: int
    segments_mb: float
    handles: dict[str, int]


class Soaked:
    """A run in a temporary folder of its own, which tells what belongs to it."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.mark, self.temporary = uuid.uuid4().hex, folder / "t"
        self.prefixes: set[str] = set()  # of its files in shared memory, as its pools were seen
        self.temporary.mkdir()
        environment = os.environ | {"TMPDIR": str(self.temporary), "M2FLOW_MARK": self.mark}
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=self.errors
        )
        self.metrics = folder / "run" / "metrics.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.metrics).rows if row["step"]]

    def check(self) -> None:
        """Raise if the run has ended."""
        if self.process.poll() is not None:
            self.errors.seek(0)
            raise RuntimeError(f"ended with {self.process.returncode}: {self.errors.read()}")

    def family(self) -> list[psutil.Process]:
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def kill_one(self, drawn: random.Random) -> str:
        """Kill the oldest lane or simulator; which of the two, "" if there was none."""
        found: dict[str, list[psutil.Process]] = {}
        for one in self.family():
            with suppress(psutil.Error):
                line = " ".join(one.cmdline())
                for kind, words in VICTIMS.items():
                    if words in line:
                        found.setdefault(kind, []).append(one)
        if not found:
            return ""
        kind = drawn.choice(sorted(found))
        with suppress(psutil.Error):
            min(found[kind], key=lambda one: one.create_time()).kill()  # so they take turns
        return kind

    def sample(self, begun: float) -> Sample:
        memory, handles, by_name = [], [], Counter[str]()
        family = self.family()
        for one in family:
            with suppress(psutil.Error):
                found, files = one.memory_full_info(), one.num_fds()
                by_name[_name(one)] += files
                memory.append(found.pss / 1e6)
                handles.append(files)
        last = self.rows()[-1]
        segments = self.segments()
        return Sample(
            time.monotonic() - begun,
            int(last["step"]),
            int(last["lanes/restarts"]),
            len(memory),
            _own_mb(family[0]),
            sum(memory),
            handles[0],
            sum(handles),
            len(segments),
            sum(segments.values()) / 1e6,
            dict(by_name),
        )

    def segments(self) -> dict[Path, int]:
        """The run's files in shared memory, with the bytes of memory that they take."""
        self.prefixes |= {f"{path.name}-" for path in self.temporary.glob("m2flow-*")}
        found: dict[Path, int] = {}
        for path in SHARED.glob("m2flow-*"):
            if path.name.startswith(tuple(self.prefixes)):
                with suppress(FileNotFoundError):
                    found[path] = 512 * path.stat().st_blocks  # a file is as long as it may get
        return found

    def left_behind(self) -> list[str]:
        """Processes of the run, its temporary files and its shared memory."""
        found = [str(path) for path in (*self.temporary.iterdir(), *self.segments())]
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


def _own_mb(process: psutil.Process) -> float:
    """What a process alone has, 10**6 bytes, without files in shared memory."""
    return sum(
        (one.private_clean + one.private_dirty) / 1e6
        for one in process.memory_maps(grouped=False)
        if not one.path.startswith(f"{SHARED}/")
    )


def _name(process: psutil.Process) -> str:
    """What a process runs: its title, its program, or the script or module that Python runs."""
    first, *rest = process.cmdline() or [process.name()]
    if first.startswith("ray::") or not Path(first).name.startswith("python"):
        return Path(first).name
    scripts = (Path(word).name for word in rest if not word.startswith("-"))
    return next(scripts, first)


def main() -> None:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="m2k-"))  # short: Ray's sockets lie there
    try:
        run = Soaked(folder, _command(folder / "run", options))
        try:
            samples, faults = _soak(run, options)
            code, left = _end(run)
        finally:
            run.process.kill()
            run.process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _report(samples)
    killed = " and ".join(f"{count} {kind}s" for kind, count in sorted(faults.items()))
    print(f"killed: {killed or 'nobody'}; exit code {code}; left behind: {left or 'nothing'}")
    slopes = {what: trend(samples, name) for what, name in TRENDS.items()}
    for what, (slope, error) in slopes.items():
        print(f"trend an hour, {what}: {slope:+.1%}, standard error {error:.1%}")
    results = {
        "samples": [asdict(one) for one in samples],
        "trends": slopes,
        "faults": faults,
        "left": left,
    }
    name = "soak_embodied" if options.embodied else "soak"
    conclude(name, results, _targets(samples, slopes, faults["lane"], code, left), options)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help=f"how long; {MINUTES:g} if it is not said")
    parser.add_argument("--embodied", action="store_true", help="simulators in processes")
    parser.add_argument("--mode", default="disaggregated", help="of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    options = parser.parse_args()
    options.minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    return options


def _command(folder: Path, options: argparse.Namespace) -> list[str]:
    if options.embodied:
        recipe = "quickstart-embodied"
        words = ["environment.processes=2", "evaluation.films=0"]
    else:
        recipe, (_, _, source) = "quickstart", quickstart()
        words = [f"model.path={source.path}", "warmup.steps=0"]
    return [
        *(sys.executable, "-m", "m2flow", "train", str(ROOT / "recipes" / f"{recipe}.yaml")),
        *("--mode", options.mode, "--run-dir", str(folder), "lanes=cpu:2", *words),
        *("steps=1000000", "lane_restarts=1000000", "evaluation.every=100"),
    ]


def _soak(run: Soaked, options: argparse.Namespace) -> tuple[list[Sample], Counter[str]]:
    """Samples, and how many of which kind were killed."""
    deadline = time.monotonic() + 300
    while not run.rows():
        run.check()
        if time.monotonic() > deadline:
            raise RuntimeError("no step within 300 s")
        time.sleep(0.2)
    begun, drawn = time.monotonic(), random.Random(options.seed)
    until = begun + 60 * options.minutes
    samples: list[Sample] = []
    faults, next_fault = Counter[str](), begun + FAULT_SECONDS * drawn.uniform(0.2, 0.8)
    while (now := time.monotonic()) < until:
        run.check()
        if now >= next_fault and (kind := run.kill_one(drawn)):
            faults[kind] += 1
            next_fault = begun + FAULT_SECONDS * (faults.total() + drawn.uniform(0.2, 0.8))
        samples.append(run.sample(begun))
        time.sleep(SAMPLE_SECONDS)
    return samples, faults


def _end(run: Soaked) -> tuple[int, list[str]]:
    """End the run as a scheduler does; its exit code, and what is left after a while."""
    run.process.send_signal(signal.SIGTERM)
    code = run.process.wait(END_SECONDS)
    deadline = time.monotonic() + END_SECONDS
    while (left := run.left_behind()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return code, left


def _report(samples: Sequence[Sample]) -> None:
    names = [one.name for one in fields(Sample) if one.name != "handles"]
    every = max(1, len(samples) // 30)
    table(
        [name.replace("_", " ") for name in names],
        [
            [
                round(value, 1) if isinstance(value, float) else value
                for value in (getattr(one, name) for name in names)
            ]
            for one in samples[::every]
        ],
    )


def _growth(samples: Sequence[Sample], name: str) -> float:
    third = len(samples) // 3
    before, after = samples[third : 2 * third], samples[2 * third :]
    return max(getattr(one, name) for one in after) / max(getattr(one, name) for one in before)


def trend(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """By what share of its mean a figure grows in an hour, and the standard error of that."""
    late = samples[len(samples) // 3 :]
    usual = Counter(one.processes for one in late).most_common(1)[0][0]
    some = [one for one in late if one.processes == usual]
    hours = [one.seconds / 3600 for one in some]
    values = [float(getattr(one, name)) for one in some]
    line, mean = statistics.linear_regression(hours, values), statistics.fmean(values)
    off = [y - line.intercept - line.slope * x for x, y in zip(hours, values, strict=True)]
    squares = math.fsum(x * x for x in off)
    if not squares or len(off) < 3:
        return line.slope / mean, 0.0
    alike = min(max(0.0, math.fsum(x * y for x, y in pairwise(off)) / squares), 0.99)
    spread = math.fsum((x - statistics.fmean(hours)) ** 2 for x in hours)
    error = math.sqrt(squares / (len(off) - 2) / spread * (1 + alike) / (1 - alike))
    return line.slope / mean, error / mean


TRENDS = {
    "memory of the launcher": "launcher_mb",
    "memory of all": "all_mb",
    "handles of the launcher": "launcher_handles",
    "handles of all": "all_handles",
    "bytes in shared memory": "segments_mb",
}
"""What may not grow by more than a tenth in an hour, and its figure."""


def _targets(
    samples: Sequence[Sample],
    slopes: Mapping[str, tuple[float, float]],
    lanes_killed: int,
    code: int,
    left: Sequence[str],
) -> list[Target]:
    grown = {
        "memory of the launcher": ("launcher_mb", 1.05),
        "memory of all": ("all_mb", 1.1),
        "handles of the launcher": ("launcher_handles", 1.05),
        "handles of all": ("all_handles", 1.1),
        "processes": ("processes", 1.1),
        "files in shared memory": ("segments", 1.25),
        "bytes in shared memory": ("segments_mb", 1.25),
    }
    return [
        *(
            Target(f"growth, {what}", _growth(samples, name), bound, at_most=True)
            for what, (name, bound) in grown.items()
        ),
        *(
            Target(f"trend an hour less two errors, {what}", slope - 2 * error, 0.1, at_most=True)
            for what, (slope, error) in slopes.items()
        ),
        Target("faults less restarts", lanes_killed - samples[-1].restarts, 1, at_most=True),
        Target("ended by SIGTERM with a checkpoint", float(code == 128 + signal.SIGTERM), 1),
        Target("left behind", len(left), 0, at_most=True),
    ]


if __name__ == "__main__":
    main()
