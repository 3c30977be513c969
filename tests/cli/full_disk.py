"""Runs `m2flow train` again and again, each time on a disk that is full from a chosen moment on.

A program of its own: `python full_disk.py RECIPE OUT MOMENT...`. Where it may mount, it runs on a
small tmpfs, of which it takes all room at the moment. Elsewhere the system's limit on the size of
files (RLIMIT_FSIZE) stands for the full disk. For each moment OUT/MOMENT.json says how the run
ended, and OUT/MOMENT is the run, when there was room again and it was resumed.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from m2flow.cli.app import main
from m2flow.errors import UserError
from m2flow.models import causal_lm  # noqa: F401 - imported once, for all children
from m2flow.observe.ending import ending_of
from m2flow.observe.run_directory import RunDirectory
from m2flow.runtime.lane.journal import JournalWriter
from m2flow.training.checkpoint import resume_point, step_of
from m2flow.workloads.common import run as training
from m2flow.workloads.reasoning import experiment, workers  # noqa: F401

DISK_BYTES = 4_000_000
LEFT = {"half a checkpoint": 30_000, "torn row": 100, "lanes": 30_000}
"""By moment how many bytes are left of the room that there was."""

MOMENTS = {
    "run directory": None,
    "starting model": (experiment.ReasoningExperiment, "prepare", 1),
    "samples": (RunDirectory, "append_samples", 1),
    "metrics": (RunDirectory, "append_metrics", 4),
    "torn row": (RunDirectory, "append_metrics", 4),
    "checkpoint": (experiment.ReasoningExperiment, "save", 2),
    "half a checkpoint": (experiment.ReasoningExperiment, "save", 2),
    "timeline": (training.Timeline, "write", 1),
    "journal": (JournalWriter, "add", 1),
    "lanes": (experiment.ReasoningExperiment, "save", 2),
}
"""By moment the method before whose so-manyeth call the disk is full."""


WORDS = {"lanes": ["mode=collocated", "lanes=cpu:2"]}
"""By moment what else is set until the disk is full: here lanes write the checkpoint's parts."""


def fill(disk: Path, left: int) -> None:
    """Leave so many bytes."""
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (left, resource.RLIM_INFINITY))
        return
    with (disk / "filler").open("wb", buffering=0) as file:
        while True:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), 4096)
            except OSError:
                break
        file.truncate(max(0, file.tell() - left))


def full_at(moment: str, disk: Path) -> None:
    """Arrange for the disk to be full at a moment."""
    left = LEFT.get(moment, 0)
    if MOMENTS[moment] is None:
        fill(disk, left)
        return
    kind, name, count = MOMENTS[moment]
    method: Callable[..., Any] = getattr(kind, name)

    def patched(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count -= 1
        if count == 0:
            fill(disk, left)
        return method(*arguments, **options)

    setattr(kind, name, patched)


def train(*words: str) -> int:
    """`m2flow train` in a child; its exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            sys.argv = ["m2flow", "train", recipe, "steps=4", *words]
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_on_full_disk(moment: str, disk: Path) -> dict[str, object]:
    """One run that meets a full disk, then goes on."""
    errors = out / "errors"
    child = os.fork()
    if not child:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
        full_at(moment, disk)
        code = 1
        try:
            words = ["steps=4", *WORDS.get(moment, ())]
            sys.argv = ["m2flow", "train", recipe, *words, "--run-dir", str(disk / "run")]
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (disk / "filler").unlink(missing_ok=True)
    account = []
    with suppress(UserError):  # nothing was begun
        account = ending_of(disk / "run").lines
    left = sorted(str(path.relative_to(disk)) for path in disk.rglob(".*"))
    resumable = any((disk / "run").glob("*.jsonl")) or (disk / "run" / "config.yaml").exists()
    words = ["--run-dir", str(disk / "run"), *(["--resume"] if resumable else [])]
    kept = resume_point(disk / "run" / "checkpoints")
    told = {"code": code, "err": errors.read_text(), "left": left, "account": account}
    told["kept"] = 0 if kept is None else step_of(kept)
    return told | {"resumed": train(*words)}


recipe, folder, *chosen = sys.argv[1:]
out = Path(folder)
disk = out / "disk"
disk.mkdir()
with suppress(FileNotFoundError):
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
for moment in chosen:
    if moment in WORDS and not mounted:
        continue  # a limit of this process is none of the lanes'
    said = run_on_full_disk(moment, disk)
    (out / f"{moment}.json").write_text(json.dumps(said))
    shutil.copytree(disk / "run", out / moment, symlinks=True)
    shutil.rmtree(disk / "run")
