"""What became of a run, read from its directory: how it ended, what is left, what to do.

Promises: nothing is changed, and a directory in any state gives an account. A run whose launcher
was killed could leave no word; its process, which `run.json` names, tells it from one that runs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from m2flow.errors import UserError
from m2flow.observe.formatting import date
from m2flow.observe.record import RunRecord, as_number, read_run
from m2flow.training.checkpoint import resume_point, step_of

SAME_SECONDS = 2.0
"""Processes of one number that began further apart than this are two."""

TAIL = 20
"""Lines of a failure's account that are shown."""

REMEDIES = (
    (r"could not be written", "make room, or allow writing, where the line above says"),
    (r"samples of step \d+", "see why the reward fails; skipped/ has what it was given"),
    (r"episodes were given up", "see why the simulators fail; skipped/ has the seeds"),
    (
        r"max_skipped_updates",
        "see skipped/; raise max_skipped_updates, or lower optimizer.learning_rate in a new run",
    ),
    (
        r"OutOfMemory|MemoryError|out of memory",
        "lower training.tokens_per_microbatch or update.turns_per_microbatch, or raise lanes",
    ),
    (
        r"no progress with loading|have not started within",
        "raise load_deadline_seconds if it is only slow",
    ),
    (
        r"was lost|was ended by SIGKILL",
        "see whether the system killed it for want of memory: `dmesg | grep -i oom`",
    ),
    (
        r"deadline|within \d+ s",
        "see who waits for whom below; raise deadline_seconds if it is slow",
    ),
)
"""By what an end says, what to look at before the run goes on; the first that fits is shown."""


@dataclass(frozen=True)
class Ending:
    """What became of a run.

    Attributes:
        state: `finished`, `running`, `stopped` (by a signal), `failed`, `killed` (without a word),
            or `unknown` (another machine's).
        lines: for people: what happened, what is left, what to do.
    """

    state: str
    lines: tuple[str, ...]


def this_process() -> dict[str, object]:
    """What `run.json` says of the launcher, so that it is known again."""
    own = psutil.Process()
    return {"id": own.pid, "began": own.create_time(), "host": socket.gethostname()}


def record_of(run_dir: Path | str) -> RunRecord:
    """Read a run's directory.

    Raises:
        UserError: there is no such directory, or it holds no run.
    """
    record = read_run(run_dir)
    if not record.run and not record.metrics:
        raise UserError(
            "holds neither run.json nor metrics.jsonl",
            key=str(run_dir),
            expected="a directory that m2flow train wrote",
        )
    return record


def ending_of(run_dir: Path | str) -> Ending:
    """Read what became of a run.

    Raises:
        UserError: there is no such directory, or it holds no run.
    """
    record = record_of(run_dir)
    state, happened = _what_happened(record.run)
    lines = [happened, _how_far(record), *_kept(record), *record.problems]
    if state not in ("finished", "running"):
        hints = (hint for pattern, hint in REMEDIES if re.search(pattern, happened))
        lines += [f"first: {hint}" for hint in islice(hints, 1)]
        directory = record.directory
        config, path = shlex.quote(str(directory.config)), shlex.quote(str(directory.path))
        again = f"m2flow train {config} --run-dir {path} --resume"
        if not directory.config.is_file():
            again = "start a new run: no config.yaml says how this one began"
        lines.append(f"to go on: {again}")
    if state == "failed" and record.directory.failure.is_file():
        text = record.directory.failure.read_text("utf-8", "replace").splitlines()
        lines += [f"{record.directory.failure}, its end:", *(f"  {one}" for one in text[-TAIL:])]
    return Ending(state, tuple(lines))


def _what_happened(run: Any) -> tuple[str, str]:
    if (finished := as_number(run.get("finished"))) is not None:
        return "finished", f"finished at {date(finished)}"
    if (ended := as_number(run.get("ended"))) is not None:
        why = str(run.get("why") or "no reason is given")
        state = "stopped" if re.match(r"SIG[A-Z]+: ", why) else "failed"
        return state, f"{state} at {date(ended)}: {why}"
    process = run.get("process")
    if not isinstance(process, dict):
        return "unknown", "has not finished; nothing says which process it was"
    if process.get("host") != socket.gethostname():
        return "unknown", f"has not finished; its process is on {process.get('host')}: ask there"
    if _lives(process):
        return "running", f"is running, as process {process['id']}"
    return "killed", (
        f"its process {process.get('id')} has gone without a word: killed (for want of memory? "
        "`dmesg | grep -i oom`), or the machine went down"
    )


def _lives(process: dict[str, Any]) -> bool:
    number, began = process.get("id"), as_number(process.get("began"))
    if not isinstance(number, int) or began is None:
        return False
    try:
        return abs(psutil.Process(number).create_time() - began) < SAME_SECONDS
    except (psutil.Error, ValueError, OverflowError):
        return False


def _how_far(record: RunRecord) -> str:
    planned = record.planned_steps
    line = f"steps: {record.last_step} of {'?' if planned is None else planned}"
    times = [time for row in record.metrics if (time := as_number(row.get("time"))) is not None]
    return f"{line}, the last at {date(times[-1])}" if times else line


def _kept(record: RunRecord) -> list[str]:
    directory = record.directory
    lines = []
    try:
        saved = resume_point(directory.checkpoints)
        if saved is None:
            lines.append("checkpoint: none was saved; --resume begins again")
        else:
            lost = max(0, record.last_step - step_of(saved))
            lines.append(f"checkpoint: step {step_of(saved)}, whole; {lost} steps would run again")
    except (UserError, ValueError, OSError) as error:
        lines.append(f"checkpoint: {error}")
    if skipped := sorted(path.name for path in directory.skipped.glob("*.jsonl")):
        lines.append(
            f"left out (not finite, without a reward, or given up): rollouts of {len(skipped)} "
            f"steps, the last in {skipped[-1]}"
        )
    partial = [path for path in directory.checkpoints.glob(".*.partial") if path.is_dir()]
    if partial:
        lines.append(f"a checkpoint was being written: {partial[0].name}; --resume clears it away")
    free = shutil.disk_usage(directory.path).free
    lines.append(f"disk: {free / 1e9:.1f} GB free" + ("" if free > 1e9 else ": too little"))
    return lines
