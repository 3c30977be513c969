"""End a run between steps when a signal asks for it (from a terminal, scheduler or person).

The first SIGTERM, SIGHUP or SIGINT is noted, and the run ends after the step at hand, with a
checkpoint. After a grace time that step is given up, as soon as the run asks (`heed`). If it does
not, `StepInterrupted` is raised in the main thread, wherever it is, and at a second signal
`Stopped`; a third one ends the process. Knows no run: `Training` asks.

Before the first step `Stopped` is raised at once, and cuts imports off as well. Packages swallow it
there, and fail later: what fails after it was raised is taken for its consequence.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from m2flow.errors import CannotWrite, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

HEED_SECONDS = 3.0
"""How long after the grace time a run may take to ask; one that computes itself asks late."""


class StepOverdue(Stopped):
    """The step at hand has outlasted its grace time, and the run has asked between two events."""


class StepInterrupted(StepOverdue):
    """The run has not asked, as it does not while it computes a step itself."""


class Stopping:
    """Use as a context manager, in the main thread; in another one it never hears of a signal.

    Args:
        grace_seconds: how long the step at hand may last.

    Attributes:
        asked: the signal that has asked for the end; None for none.
        raised: whether `Stopped` has been raised wherever the main thread was.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.asked: int | None = None
        self.raised = False
        self._count, self._patient, self._in_step, self._overdue = 0, False, False, False
        self._interrupting = False  # the next signal is this object's own
        self._timer: threading.Timer | None = None
        # Between a timer's thread and the end of a step; a handler may interrupt who holds it.
        self._lock = threading.RLock()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets SIGHUP
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.step_is_over()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.is_consequence(error):
            assert self.asked is not None
            raise Stopped(self.asked) from error

    def is_consequence(self, error: BaseException | None) -> bool:
        """Whether an error is not to be told, since it is what `Stopped` has brought about."""
        return self.raised and isinstance(error, Exception) and not isinstance(error, CannotWrite)

    def step_begins(self) -> bool:
        """Whether a step may begin. From now on a signal waits for `step_is_over`."""
        self._patient = True
        self._in_step = self.asked is None
        return self._in_step

    def step_is_over(self) -> int | None:
        """The signal that has asked for the end, if any.

        What follows, such as a checkpoint, has no grace time; a second signal still ends it.
        """
        with self._lock:
            self._in_step = self._overdue = False
            if self._timer is not None:
                self._timer.cancel()
        return self.asked

    def heed(self) -> None:
        """Raise if the step at hand is to be given up; it can still be left in good order."""
        if self._overdue and self.asked is not None:
            self.step_is_over()
            raise StepOverdue(self.asked)

    def _is_overdue(self) -> None:
        with self._lock:
            if not self._in_step:  # it has ended just now
                return
            self._overdue = True
            self._after(HEED_SECONDS, self._interrupt)

    def _interrupt(self) -> None:
        with self._lock:
            if not self._in_step:
                return
            assert self.asked is not None
            self._interrupting = True
            os.kill(os.getpid(), self.asked)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, do)
        self._timer.daemon = True
        self._timer.start()

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if self._interrupting:
            self._interrupting = False
            if self._in_step:
                self.step_is_over()
                self._count += 1
                assert self.asked is not None
                self.raised = True
                raise StepInterrupted(self.asked)
            return
        self._count += 1
        if self._count > 2:
            os.write(2, f"{signal.Signals(number).name} once more: ended at once\n".encode())
            os._exit(128 + number)  # lanes, cluster and shared memory end with the process
        first, self.asked = self.asked is None, self.asked or number
        if not first or not self._patient:
            self._count, self.raised = 2, True
            raise Stopped(self.asked)
        words = f"{signal.Signals(number).name}: ending after this step, or in "
        words += f"{self.grace_seconds:g} s at the latest; a second signal ends at once"
        os.write(2, f"{words}\n".encode())  # a handler must not wait for the lock of a stream
        if self._in_step:
            self._after(self.grace_seconds, self._is_overdue)
