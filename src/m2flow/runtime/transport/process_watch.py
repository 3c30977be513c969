"""`ProcessWatch`: whether a process of this machine has ended.

The kernel makes a descriptor of a process readable when the process ends. Older builds of Python
know no such descriptors, nor do some kernels and sandboxes, and a process may have none left. Then
the process is known by its number and by when it began, and is looked at again and again.
"""

from __future__ import annotations

import os
import select
import time

import psutil

LOOK_SECONDS = 0.01
"""How often a process without a descriptor is looked at while its end is waited for."""


class ProcessWatch:
    """Watches a process until `close`.

    Args:
        number: of the process. One that is not there has ended.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._descriptor: int | None = None
        self._process: psutil.Process | None = None
        self._is_gone = False
        try:
            self._descriptor = os.pidfd_open(number)
        except (AttributeError, OSError):
            self._lives()  # which notes when it began

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether the process has ended; waits for it, but no longer than this.

        A process that nobody has waited for yet (a zombie) has ended.
        """
        if (descriptor := self._descriptor) is not None:  # another thread may close it
            poll = select.poll()  # because select takes no descriptor above 1023
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        deadline = time.monotonic() + seconds
        while self._lives():
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(LOOK_SECONDS, left))
        return True

    def close(self) -> None:
        """Watch the process no more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _lives(self) -> bool:
        if self._is_gone:
            return False
        try:
            self._process = self._process or psutil.Process(self._number)
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            pass
        except OSError:  # no descriptor is left to look with
            return True
        self._is_gone = True
        return False
