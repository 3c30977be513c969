"""Accounts of lanes that have stalled: their stacks, and the last they have printed.

Lanes on other machines are asked by a task of Ray there. Every wait is bounded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from m2flow.errors import RunFailed, Stalled
from m2flow.runtime.lane.stacks import SIGNAL, STACKS

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool

ELSEWHERE_SECONDS = 15.0
"""Longest to wait for accounts of lanes on other machines."""

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
    found: dict[int, str] = {}
    elsewhere: dict[str, list[_LaneProcessAt]] = {}
    here: list[_LaneProcessAt] = []
    for lane, address in pool.addresses.items():
        (position,) = pool.positions([lane])
        one = _LaneProcessAt(lane, position, address.process_id)
        (here if pool.is_here(lane) else elsewhere.setdefault(address.node, [])).append(one)
    asked = {node: _ask(node, pool.folder.name, lanes) for node, lanes in elsewhere.items()}
    found |= accounts_here(str(pool.folder), here, pool.logs)
    deadline = time.monotonic() + ELSEWHERE_SECONDS
    for node, lanes in elsewhere.items():
        try:
            found |= ray.get(asked[node], timeout=max(0.1, deadline - time.monotonic()))
        except RayError as error:  # also if it takes too long
            first_line, *_ = str(error).splitlines() or [type(error).__name__]
            found |= {one.lane: f"{one}\n  its machine has not told: {first_line}" for one in lanes}
    return [found[lane] for lane in sorted(found)]


@dataclass(frozen=True, slots=True)
class _LaneProcessAt:
    """A lane, its position in the pool, and its process."""

    lane: int
    position: int
    process: int

    def __str__(self) -> str:
        return f"Lane {self.lane}, process {self.process}:"


def _ask(node: str, folder: str, lanes: Sequence[_LaneProcessAt]) -> Any:
    """What will be the accounts of lanes of another machine."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(accounts_here)
    return task.options(scheduling_strategy=strategy).remote(folder, lanes)


def accounts_here(
    folder: str, lanes: Sequence[_LaneProcessAt], logs: Path | None = None
) -> dict[int, str]:
    """Accounts of lanes of this machine, by lane.

    Args:
        folder: of the pool's files here, as lanes here are told of it.
        lanes: which.
        logs: where Ray keeps what they print, if it is known.
    """
    there = Path(tempfile.gettempdir()) / folder
    files = {one: there / STACKS.format(one.position) for one in lanes}
    before = {one: file.stat().st_size for one, file in files.items() if file.is_file()}
    for one in before:
        with suppress(ProcessLookupError):
            os.kill(one.process, SIGNAL)
    _wait_for({files[one]: size for one, size in before.items()})
    found = {}
    for one in lanes:
        lines = [str(one)]
        if one not in before:
            lines.append("  it shares its process, which writes no stacks")
        else:
            written = _text(files[one], before[one])
            lines += written.splitlines() or list(_from_outside(one.process))
            lines += list(_printed(logs, one.process))
        found[one.lane] = "\n".join(lines)
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
    """The last lines that a lane has printed, where they go into files on this machine."""
    files = set(logs.glob(f"worker-*-{process}.*")) if logs is not None else set()
    for stream in (1, 2):
        with suppress(OSError):
            file = Path(f"/proc/{process}/fd/{stream}").readlink()
            if file.is_file():
                files.add(file.resolve())
    for file in sorted({file.resolve() for file in files}):
        lines = file.read_text("utf-8", "replace").splitlines()[-LINES:]
        if lines:
            yield f"  the last of {file.name}:"
            yield from (f"    {line}" for line in lines)
