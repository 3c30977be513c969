"""Strangers who connect and say nothing, or babble, and how long a friend takes beside them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

STRANGER_SECONDS = 2.0
"""Longest that strangers may delay a friend's connection."""

SOON = 5.0

Knock = Callable[[], socket.socket]


@contextlib.contextmanager
def strangers(knock: Knock, silent: int = 1, babbling: int = 1) -> Iterator[None]:
    """Have strangers connected within; those who babble come again when they are turned away."""
    ended, begun = threading.Event(), threading.Semaphore(0)

    def babble() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError), knock() as one:
                one.settimeout(0.5)
                while not ended.is_set():
                    one.sendall(os.urandom(1 << 12))
                    begun.release()

    threads = [threading.Thread(target=babble) for _ in range(babbling)]
    with contextlib.ExitStack() as quiet:
        for _ in range(silent):
            quiet.enter_context(knock())
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                assert begun.acquire(timeout=SOON)
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def seconds_of(visit: Callable[[], object]) -> float:
    """How long a friend's visit takes."""
    started = time.monotonic()
    visit()
    return time.monotonic() - started


def check_nobody_waits(
    visit: Callable[[], object],
    knock: Knock,
    *,
    silent: int = 1,
    babbling: int = 1,
    visits: int = 3,
) -> None:
    """Each visit of a friend beside strangers takes at most 2 s more than the longest without."""
    alone = max(seconds_of(visit) for _ in range(visits))
    with strangers(knock, silent, babbling):
        for _ in range(visits):
            assert seconds_of(visit) < alone + STRANGER_SECONDS
