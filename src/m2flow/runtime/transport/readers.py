"""The processes that read from a pool: the blocks leased to one that has exited are reclaimed.

A socket that closes says little: a thread may have given up, a value may live on. So it is the
process that is watched, through a descriptor that the kernel makes readable when it ends.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading

from m2flow.runtime.transport.shared_memory import SharedPool


class ReadersOf:
    """Who has read from a pool.

    Args:
        pool: whose blocks come back.
    """

    def __init__(self, pool: SharedPool) -> None:
        self._pool = pool
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, connection: socket.socket) -> None:
        """Watch the process at the other end of a unix socket, which reads under this name."""
        with self._lock:
            if name not in self._descriptors:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                process, _, _ = struct.unpack("iii", credentials)
                try:
                    self._descriptors[name] = os.pidfd_open(process)
                except ProcessLookupError:  # it ended meanwhile
                    self._pool.forget(name)

    def reclaim_from_dead(self, *, wait_for: str | None = None) -> bool:
        """Reclaim the blocks leased to processes that have exited. Returns True if any had.

        Args:
            wait_for: a reader that has just fallen silent: it may end within a second.
        """
        with self._lock:
            watched = dict(self._descriptors)
        if wait_for in watched:
            _ended(watched[wait_for], 1.0)
        dead = [name for name, one in watched.items() if _ended(one)]
        for name in dead:
            with self._lock:
                descriptor = self._descriptors.pop(name, None)
            if descriptor is not None:
                os.close(descriptor)
                self._pool.forget(name)
        return bool(dead)

    def close(self) -> None:
        """Watch nobody any more."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()


def _ended(descriptor: int, seconds: float = 0.0) -> bool:
    # poll, because select takes no descriptor above 1023.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
