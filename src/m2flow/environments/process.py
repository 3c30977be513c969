"""One process of environments, seen from its parent: start, command, await, kill.

Every wait has a deadline, and there is one way for a process to be lost: `await_replies` says so,
by what cause. Whoever asked kills it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

TAIL_CHARS = 2000
LOG_BYTES = 1 << 20

IN_TURN = 0.1
"""Seconds in which replies are awaited one after the other, before all that are late together."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a process makes, and with what.

    Attributes:
        name, options: of the environment, as `registry.make_environment` takes them.
        python: interpreter, with NumPy and the simulator installed; None for this one.
        variables: environment variables that stand before the simulator is imported.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


class Lost(NamedTuple):
    """A process that gave no reply: "killed" or "hung", and the end of what it wrote."""

    cause: str
    detail: str


class SimulatorProcess:
    """A process that runs `child.py`.

    Args:
        number: its position among its siblings.
        ids: the environments in it.
        source: what it makes.
        descriptor: of the memory for observations, which it inherits.
    """

    def __init__(self, number: int, ids: range, source: Source, descriptor: int) -> None:
        self.number, self.ids, self.source = number, ids, source
        self._descriptor = descriptor
        self.ready = False
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115, closed with the process
        self.start()

    def start(self) -> None:
        """Start it, or start it again; `("made", spec)` is what it first replies."""
        self.ready = False
        self._connection, theirs = connection.Pipe()
        self._patience: float | None = None  # what reads and writes of the connection are bound to
        self._said_something = select.poll()
        self._said_something.register(self._connection.fileno(), select.POLLIN)
        program = (
            f"import sys; {_search_path(self.source.python)}"
            "from m2flow.environments.child import main; "
            f"main({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [self.source.python or sys.executable, "-X", "faulthandler", "-c", program],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs.fileno(), self._descriptor),
            # One thread, where a lane has set as many for itself as it has cores.
            env={**os.environ, "OMP_NUM_THREADS": "1", **self.source.variables},
        )
        theirs.close()
        self.send(("make", self.source.name, dict(self.source.options), len(self.ids)))

    @property
    def pid(self) -> int:
        """Number of the process that runs now."""
        return self._process.pid

    @property
    def nbytes(self) -> int:
        """Memory of its own that it takes now; 0 where it has ended."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except FileNotFoundError:
            return 0
        kilobytes = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
        return sum(1024 * int(count) for count in kilobytes)

    def send(self, command: tuple[Any, ...], seconds: float = 60.0) -> None:
        """Send a command. That nobody takes it shows in the reply that does not come."""
        if seconds != self._patience:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                _set_timeout(self._connection.fileno(), option, seconds)
            self._patience = seconds
        with contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps(command))  # `send` takes twice as long

    def says_something(self, seconds: float) -> bool:
        """Whether there is something to read, or the process has ended, within that time."""
        return bool(self._said_something.poll(1e3 * seconds))

    def read(self) -> Any:
        """The reply that it has begun to send; a `Lost` if it does not come to its end."""
        try:
            return self._connection.recv()
        except BlockingIOError:  # half a reply, and then nothing
            return self.lost("hung", "it stopped in mid reply")
        except (EOFError, OSError):
            return self.lost("killed", self.ending())

    def kill(self) -> None:
        """End the process and wait for that; harmless where it has ended."""
        self.ready = False
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._connection.close()

    def leave(self) -> None:
        """Have the process end by itself, as soon as it can."""
        self._connection.close()

    def close(self, seconds: float = 5.0) -> None:
        """Let the process end by itself, or kill it."""
        self.leave()
        if self._process.stdin is not None and not self.ready:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
            self._process.wait(seconds)
        self.kill()
        self._log.close()

    def lost(self, cause: str, what: str) -> Lost:
        """That it gives no reply: what it did, in words, and the end of what it wrote."""
        self._log.seek(max(0, self._log.tell() - TAIL_CHARS))
        wrote = self._log.read().decode(errors="replace").strip()
        return Lost(cause, f"{what}; it wrote: {wrote}" if wrote else what)

    def ending(self, seconds: float = 1.0) -> str:
        """How the process has ended that closed its connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closed no more than that
            self._process.wait(seconds)
        code = self._process.returncode
        if code is None:
            return "its process has closed its connection"
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"its process has ended {how}"

    def shorten_log(self) -> None:
        """Forget what it wrote, if that is much."""
        if os.fstat(self._log.fileno()).st_size > LOG_BYTES:
            self._log.truncate(0)


def await_replies(
    processes: Sequence[SimulatorProcess],
    seconds: float,
    progress: Callable[[int], int],
) -> dict[int, Any]:
    """One reply of each process.

    Args:
        processes: each has been sent a command.
        seconds: how long a process may go without a reply and without moving on.
        progress: a number that changes when the process of that number moves on.

    Returns:
        number of the process to its reply, or to a `Lost`.
    """
    begun = time.monotonic()
    seen = {process.number: progress(process.number) for process in processes}
    replies: dict[int, Any] = {}
    for process in processes:  # in turn, as they mostly answer: to wait for several takes longer
        if process.says_something(max(0.0, begun + min(seconds, IN_TURN) - time.monotonic())):
            replies[process.number] = process.read()
    waiting = {one._connection: one for one in processes if one.number not in replies}
    deadlines = {process.number: begun + seconds for process in waiting.values()}
    while waiting:
        first = min(deadlines.values())
        ready = connection.wait(list(waiting), max(0.0, first - time.monotonic()))
        for line in ready:
            assert isinstance(line, connection.Connection)
            process = waiting.pop(line)
            replies[process.number] = process.read()
            del deadlines[process.number]
        now = time.monotonic()
        for line, process in list(waiting.items()):
            number = process.number
            moved = progress(number)
            if moved != seen[number]:
                seen[number], deadlines[number] = moved, now + seconds
            elif now >= deadlines[number]:
                del waiting[line], deadlines[number]
                replies[number] = process.lost("hung", f"no sign of life for {seconds:g} s")
    return replies


def accelerator_bytes(pids: Collection[int]) -> int:
    """Bytes of GPU memory that processes compute or draw in; 0 where nvidia-smi does not tell."""
    command = ["nvidia-smi", "pmon", "-c", "1", "-s", "m"]  # columns: gpu, pid, type, MB, ...
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return 0
    mine = {str(pid) for pid in pids}
    rows = [row for line in said.stdout.splitlines() if len(row := line.split()) > 3]
    return sum(2**20 * int(row[3]) for row in rows if row[1] in mine and row[3].isdigit())


def _search_path(python: str | None) -> str:
    """Source text that lets the child find m2flow and the user's modules.

    Another interpreter has packages of its own: it gets m2flow and the working folder behind them.
    """
    if python is None:
        return f"sys.path[:] = {sys.path!r}; "
    root = str(Path(__file__).parents[2])
    return f"sys.path += {[root, str(Path.cwd())]!r}; "


def _set_timeout(descriptor: int, option: int, seconds: float) -> None:
    """Bound each single read or write of a socket."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    line = socket.socket(fileno=os.dup(descriptor))
    try:
        line.setsockopt(socket.SOL_SOCKET, option, value)
    finally:
        line.close()
