"""The processes that read from a pool: the blocks leased to one that has exited are reclaimed.

A socket that closes says little: a thread may have given up, a value may live on. So it is the
process that is watched.
"""

from __future__ import annotations

import socket
import struct
import threading

from m2flow.runtime.transport.process_watch import ProcessWatch
from m2flow.runtime.transport.shared_memory import SharedPool


class ReadersOf:
    """Who has read from a pool.

    Args:
        pool: whose blocks come back.
    """

    def __init__(self, pool: SharedPool) -> None:
        self._pool = pool
        self._watches: dict[str, ProcessWatch] = {}
        self._lock = threading.Lock()

    def add(self, name: str, connection: socket.socket) -> None:
        """Watch the process at the other end of a unix socket, which reads under this name."""
        with self._lock:
            if name not in self._watches:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                process, _, _ = struct.unpack("iii", credentials)
                self._watches[name] = ProcessWatch(process)

    def reclaim_from_dead(self, *, wait_for: str | None = None) -> bool:
        """Reclaim the blocks leased to processes that have exited. Returns True if any had.

        Args:
            wait_for: a reader that has just fallen silent: it may end within a second.
        """
        with self._lock:
            watched = dict(self._watches)
        if wait_for in watched:
            watched[wait_for].ended(1.0)
        dead = [name for name, one in watched.items() if one.ended()]
        for name in dead:
            with self._lock:
                watch = self._watches.pop(name, None)
            if watch is not None:
                watch.close()
                self._pool.forget(name)
        return bool(dead)

    def close(self) -> None:
        """Watch nobody any more."""
        with self._lock:
            for watch in self._watches.values():
                watch.close()
            self._watches.clear()
