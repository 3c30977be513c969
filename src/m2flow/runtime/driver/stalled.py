"""Accounts of lanes that have stalled: their stacks, and the last they have printed.

Lanes on the launcher's machine are asked; of others their names are given. Every wait is bounded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from m2flow.errors import RunFailed, Stalled
from m2flow.runtime.lane.stacks import SIGNAL, STACKS

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool

ANSWER_SECONDS = 2.0
"""Longest to wait for the lanes' stacks, all together."""

PY_SPY = "py-spy"
"""Reads the stacks of a process from outside, where it is installed and allowed to."""

LINES = 200
"""Of what a lane has printed, the last so many lines are shown."""


def explain(error: RunFailed, pool: LanePool) -> None:
    """Add the lanes' stacks and logs to a failure that is a stall.

    Of nothing else: a thread whose stack is written while it runs may crash its process, and lanes
    that have answered do run.
    """
    if isinstance(error.__cause__, Stalled):
        for account in accounts(pool):
            error.__cause__.add_note(account)


def accounts(pool: LanePool) -> list[str]:
    """An account of each lane of a pool, for people."""
    files = {
        lane.id: pool.folder / STACKS.format(*pool.positions([lane.id]))
        for lane in pool.lanes
        if pool.is_here(lane.id)
    }
    before = {lane: file.stat().st_size for lane, file in files.items() if file.is_file()}
    for lane in before:
        with suppress(ProcessLookupError):
            os.kill(pool.addresses[lane].process_id, SIGNAL)
    _wait_for({files[lane]: size for lane, size in before.items()})
    found = []
    for lane, address in pool.addresses.items():
        lines = [f"Lane {lane}, process {address.process_id}:"]
        if lane not in before:
            lines.append("  it is on another machine, or shares its process")
        else:
            written = _text(files[lane], before[lane])
            lines += written.splitlines() or list(_from_outside(address.process_id))
            lines += list(_printed(pool.logs, address.process_id))
        found.append("\n".join(lines))
    return found


def _wait_for(sizes: dict[Path, int]) -> None:
    """Wait until all files have grown, and grow no more."""
    deadline = time.monotonic() + ANSWER_SECONDS
    last = dict(sizes)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = {file: file.stat().st_size if file.exists() else 0 for file in sizes}
        if now == last and all(now[file] > size for file, size in sizes.items()):
            return
        last = now


def _text(file: Path, start: int) -> str:
    """A file from a byte on; nothing of one that its lane has taken away."""
    return file.read_bytes()[start:].decode("utf-8", "replace") if file.exists() else ""


def _from_outside(process: int) -> Iterator[str]:
    """What can be known of a process that does not answer."""
    yield f"  no answer; {_state(process)}"
    if (command := shutil.which(PY_SPY)) is None:
        return
    try:
        said = subprocess.run(
            [command, "dump", "--nonblocking", "--pid", str(process)],
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )
        lines = (said.stdout or said.stderr).splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        lines = [str(error)]
    yield f"  {PY_SPY}:"
    yield from (f"    {line}" for line in lines[-LINES:])


def _state(process: int) -> str:
    """What the system says of a process, in a word or two."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return "it has ended"
    found = [line.split(None, 1)[1] for line in status.splitlines() if line.startswith("State:")]
    return f"its state is {found[0]}" if found else "its state is not known"


def _printed(logs: Path | None, process: int) -> Iterator[str]:
    """The last lines that a lane has printed, where Ray keeps them on this machine."""
    for file in sorted(logs.glob(f"worker-*-{process}.*")) if logs is not None else ():
        lines = file.read_text("utf-8", "replace").splitlines()[-LINES:]
        if lines:
            yield f"  the last of {file.name}:"
            yield from (f"    {line}" for line in lines)
