"""`CallWatch`: a call in the launcher's own process that stalls ends the run, as on a lane.

A thread counts the seconds of the call. Past its deadline the call is interrupted, if it runs on
the main thread: an exception is raised there. Where none can be raised, on another thread or in a
call that never comes back to Python, all stacks are written and the process ends. Seconds in which
the process itself was stopped hardly count, and those in a debugger do not.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from m2flow.errors import RunFailed, Stalled
from m2flow.flow.progress import heard_by

SIGNAL = signal.SIGRTMIN + 7
"""Interrupts the main thread; nobody else uses it."""

GRACE_SECONDS = 30.0
"""Longest that an interrupted call may take to end before the process does."""

BEAT_SECONDS = 1.0
"""How often the thread looks, at least."""

DEBUGGERS = frozenset({"bdb", "pydevd"})
"""Modules of which a function runs while a person is in a debugger."""


class _Overdue(BaseException):
    """The deadline has passed; whoever catches every `Exception` does not catch this."""


@dataclass(slots=True)
class _Watched:
    """A call: its name, its thread, seconds that are left, and whether it was interrupted."""

    name: str
    thread: int
    left: float
    interrupted: bool = False


class CallWatch:
    """Watches one call at a time.

    Args:
        seconds: longest that a call may give nothing.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._beat = seconds, min(BEAT_SECONDS, seconds / 4)
        self._call: _Watched | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="m2flow watch", daemon=True).start()

    @contextmanager
    def over(self, name: str) -> Iterator[None]:
        """Watch what is done within.

        Raises:
            RunFailed: it has given nothing for too long; its cause is a `Stalled`, whose note has
                the stacks of all threads.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._interrupt)
        self._call = _Watched(name, threading.get_ident(), self._seconds + self._beat)
        try:
            with heard_by(self.heard):
                yield
        except _Overdue as overdue:
            stalled = Stalled(self._late(name))
            stalled.add_note(str(overdue))
            raise RunFailed(str(stalled)) from stalled
        finally:
            self._call = None

    def heard(self) -> None:
        """The call has given something: its deadline counts from now."""
        assert self._call is not None
        self._call.left, self._call.interrupted = self._seconds + self._beat, False

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _late(self, name: str) -> str:
        return f"{name} has not finished within its deadline of {self._seconds:g} s"

    def _interrupt(self, *_: object) -> None:
        call = self._call
        if call is not None and call.left <= 0 and not call.interrupted:
            call.interrupted = True
            raise _Overdue(_stacks())

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._beat):
            passed, call = time.monotonic() - last, self._call
            last += passed
            if call is not None:
                call.left -= min(passed, 2 * self._beat)
                if call.left <= 0:
                    self._act(call)

    def _act(self, call: _Watched) -> None:
        if _is_debugged(sys._current_frames().get(call.thread)):
            call.left = self._seconds
        elif call.left <= -GRACE_SECONDS or call.thread != threading.main_thread().ident:
            os.write(
                2, f"the run failed: {self._late(call.name)}, cannot be interrupted\n".encode()
            )
            faulthandler.dump_traceback(2)
            os._exit(1)
        elif not call.interrupted:
            signal.pthread_kill(call.thread, SIGNAL)


def _is_debugged(frame: FrameType | None) -> bool:
    """Whether a person is in a debugger that this frame, or one below it, has called."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _stacks() -> str:
    """The stacks of all threads, as text."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()
