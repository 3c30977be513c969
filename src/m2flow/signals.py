"""Processes that the launcher ends, and that hear nothing of who ends the launcher."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading


def leave_the_end_to_the_parent() -> None:
    """Have SIGTERM do nothing in this process; to be called in its main thread.

    A scheduler sends it to all processes of a job, of which the launcher alone knows what is to be
    done before the end. A handler is set, and the signal not blocked: what a process blocks or
    ignores is so in all that it begins, which may be ended by SIGTERM.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def end_with_pipe(descriptor: int) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed.

    It need not get to Python for that: C code that never returns holds every thread of it up.

    Args:
        descriptor: of the end to read from; nobody else has the other one than the parent.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    closed = select.poll()
    closed.register(descriptor, select.POLLHUP)
    if closed.poll(0):  # before it was asked for
        os._exit(1)
