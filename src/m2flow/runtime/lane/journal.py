"""`JournalWriter`: keeps rollouts on disk as they are finished: they need not be made again.

A thread writes; a lane that works never waits for the disk. What the thread cannot take is not
kept, and nothing is lost by that but time after a crash. Files are not synced: what was written
survives the end of the process, not that of the machine. Where the disk refuses, the writer removes
what it has written, gives up, and says why once.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from m2flow.flow.rollouts import Rollouts

SUFFIX = ".rollouts"
"""Of the journal's files, `step_NNNNNN-RANDOM.rollouts`: no process writes to that of another."""

WAITING_BYTES = 256 << 20
"""Of the rollouts that wait for the thread, at most."""


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """Where a lane keeps rollouts.

    Attributes:
        flow: name of the traced method whose rollouts are kept.
        folder: of the journal; every lane sees it.
        max_bytes: of the files that the lane has there, at most.
    """

    flow: str
    folder: str
    max_bytes: int


class JournalWriter:
    """Writes what it is given, in another thread.

    Args:
        place: where to.
        waiting_bytes: of what waits for the thread, at most.
    """

    def __init__(self, place: JournalPlace, waiting_bytes: int = WAITING_BYTES) -> None:
        self.place = place
        self._waiting_bytes, self._limit = 0, waiting_bytes
        self._lock = threading.Lock()
        self._frames: queue.SimpleQueue[tuple[Rollouts, int] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._troubles: list[str] = []
        self._refused: set[str] = set()
        self._file: tuple[int, int, Path] | None = None
        self._written: dict[Path, int] = {}
        self._off = self._full = False

    def add(self, frame: Rollouts) -> None:
        """Have a frame written, if the thread can take it."""
        size = frame.batch.nbytes
        with self._lock:
            full = self._waiting_bytes and self._waiting_bytes + size > self._limit
            if self._off or full or frame.stage in self._refused:
                return
            self._waiting_bytes += size
            self._idle.clear()
            self._frames.put((frame, size))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="m2flow journal", daemon=True
                )
                self._thread.start()

    def take_trouble(self) -> str:
        """What people should know, once; "" for nothing."""
        if not self._troubles:
            return ""
        with self._lock:
            return self._troubles.pop(0)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until all is written that was added; whether it is."""
        return self._idle.wait(seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits, and end the thread."""
        self._frames.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (entry := self._frames.get()) is not None:
            frame, size = entry
            if not self._off and frame.stage not in self._refused:
                self._keep(frame)
            with self._lock:
                self._waiting_bytes -= size
                if not self._waiting_bytes and self._frames.empty():
                    self._idle.set()
        self._close_file()

    def _keep(self, frame: Rollouts) -> None:
        from m2flow.runtime.lane.frames import Unwritable, frame_bytes  # torch comes along

        opened = self._file is not None and self._file[0] == frame.step
        if opened and self._full and not self._fits(frame.batch.nbytes):
            return  # without the work of packing it
        try:
            content = frame_bytes(frame)
        except Unwritable as error:
            self._refused.add(frame.stage)
            self._tell(f"rollouts of {frame.stage} are not kept for --resume: they hold {error}")
            return
        try:
            self._write(frame.step, content)
        except OSError as error:
            self._give_up(f"{self.place.folder}: {error.strerror or error}")

    def _write(self, step: int, content: bytes) -> None:
        if self._file is None or self._file[0] != step:
            self._open(step)
        assert self._file is not None
        before = self._full
        self._full = not self._fits(len(content))
        if self._full:
            if not before:
                self._tell("the journal is full (`journal_gb`) until the next checkpoint")
            return
        _, descriptor, path = self._file
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        self._written[path] += len(content)

    def _fits(self, num_bytes: int) -> bool:
        """Whether the journal has room for so many bytes more."""
        return sum(self._written.values()) + num_bytes <= self.place.max_bytes

    def _open(self, step: int) -> None:
        """A new file for a step; those that were deleted meanwhile count no more."""
        self._close_file()
        self._written = {path: size for path, size in self._written.items() if path.exists()}
        folder = Path(self.place.folder)
        folder.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(SUFFIX, f"step_{step:06d}-", folder)
        self._file = step, handle, Path(name)
        self._written[Path(name)] = 0

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file[1])
            self._file = None

    def _give_up(self, why: str) -> None:
        """Make room for what matters more, and keep nothing from now on."""
        self._off = True
        self._close_file()
        for path in self._written:
            path.unlink(missing_ok=True)
        self._tell(f"rollouts are no longer kept for --resume: {why}")

    def _tell(self, what: str) -> None:
        with self._lock:
            self._troubles.append(what)
