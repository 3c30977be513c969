"""Processes that the launcher ends, and that hear nothing of who ends the launcher."""

from __future__ import annotations

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
