"""Where a process can be reached: a Unix socket on its machine and, if need be, TCP for others.

Each caller proves that it knows the key (`handshake`) on a thread of its own with a short deadline,
so a stranger that says nothing holds up nobody; on a Unix socket another user is turned away, by
either side, before a word is said. A process that has run out of descriptors goes on
to accept when it has some again. A TCP connection whose other machine answers no more ends within
`SILENT_SECONDS`, and not with the deadline of whatever waits for it. (Not so a control line with
words on their way, see `lines`.)
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from m2flow.runtime.lane.ask_template import user_of
from m2flow.runtime.transport.handshake import HANDSHAKE_SECONDS, KeyRefused, prove

LOOPBACK = "127.0.0.1"

SILENT_SECONDS = 24
"""After so long without a sign of life from the other machine a TCP connection is over."""

RETRY_SECONDS = 0.1
"""How long accepting waits for descriptors, memory or threads to come back."""

ASK_AGAIN_SECONDS = 0.01
"""Until a listener that many have called at once is asked again."""

_log = logging.getLogger(__name__)


class ListenerAddress(NamedTuple):
    """Where a `Listener` listens.

    Attributes:
        unix: name of its abstract Unix socket, which needs no file and ends with the process.
        tcp: its host and port; None if it is reached on its own machine only.
    """

    unix: str
    tcp: tuple[str, int] | None = None


def this_machine() -> str:
    """Return a name that differs between machines, and between network namespaces of a machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


def connect(
    endpoint: ListenerAddress, key: bytes, *, same_node: bool, seconds: float = HANDSHAKE_SECONDS
) -> socket.socket:
    """A connection on which both sides have proved that they know the key.

    Args:
        endpoint: who to connect to.
        key: what both sides have to know.
        same_node: whether the endpoint is on this machine.
        seconds: longest that it may take, to connect and again to prove.

    Raises:
        KeyRefused: the endpoint does not know the key, or is another user's.
        TimeoutError: the endpoint did not answer in time.
        OSError: nobody listens there, or the other machine has not answered for `SILENT_SECONDS`.
    """
    address = "\0" + endpoint.unix if same_node else endpoint.tcp
    if address is None:
        raise ConnectionRefusedError("it listens on its own machine only")
    connection = socket.socket(family_of(address))
    try:
        connection.settimeout(seconds)
        prepare(connection)  # a machine that is gone does not answer the first packet either
        _reach(connection, address, seconds)
        if _of_another_user(connection):
            raise KeyRefused("another user listens there")
        prove(connection, key, accepting=False, seconds=seconds)
    except OSError as error:
        connection.close()
        raise _naming(address, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _naming(address: str | tuple[str, int], error: OSError) -> OSError:
    """The error with the address in its words. What the kernel gave up is no deadline of ours."""
    where = f"@{address[1:]}" if isinstance(address, str) else f"{address[0]}:{address[1]}"
    words = f"{where}: {error.strerror or error}"
    if error.errno is None:
        return type(error)(words)
    kind = ConnectionError if error.errno == errno.ETIMEDOUT else type(error)
    return kind(error.errno, words)


def _reach(connection: socket.socket, address: str | tuple[str, int], seconds: float) -> None:
    """Connect; a listener on this machine that many call at once says so at once, and is asked
    again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("too many callers wait there") from None
            time.sleep(ASK_AGAIN_SECONDS)


def prepare(connection: socket.socket) -> None:
    """Send small messages at once, and notice when the other machine answers no more."""
    if connection.family == socket.AF_UNIX:
        return
    probes = 3
    seconds_each = SILENT_SECONDS // (probes + 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, seconds_each),
        (socket.TCP_KEEPINTVL, seconds_each),
        (socket.TCP_KEEPCNT, probes),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS),  # for what was sent and is not answered
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _of_another_user(connection: socket.socket) -> bool:
    """Whether the kernel says so; of the other end of a TCP connection it knows nothing."""
    return connection.family == socket.AF_UNIX and user_of(connection) != os.geteuid()


class Listener:
    """Accepts connections until it is closed.

    Args:
        key: what callers have to know.
        host: this machine's address for callers on other machines; None for this machine alone.
        serve: called with each connection that was let in, on a thread of its own, which it may
            keep; it closes the connection. One that outlives the call is not hung up.

    Attributes:
        endpoint: where callers come.
    """

    def __init__(
        self, key: bytes, host: str | None, serve: Callable[[socket.socket], None]
    ) -> None:
        self._key, self._serve = key, serve
        self._ended = threading.Event()
        unix = socket.socket(socket.AF_UNIX)
        name = f"m2flow-{os.getpid()}-{secrets.token_hex(8)}"
        unix.bind("\0" + name)
        self._sockets = [unix]
        if host is not None:
            family = family_of((host, 0))
            self._sockets.append(socket.create_server((host, 0), family=family))
        tcp = None if host is None else (host, self._sockets[1].getsockname()[1])
        self.endpoint = ListenerAddress(name, tcp)
        self._let_in: set[socket.socket] = set()
        _listeners.add(self)
        for one in self._sockets:
            one.listen(128)
            threading.Thread(
                target=self._accept, args=(one,), name="m2flow listener", daemon=True
            ).start()

    def close(self) -> None:
        """Accept no more connections; those that were accepted stay open."""
        self._ended.set()
        for one in self._sockets:
            with contextlib.suppress(OSError):  # not connected: what shutting a listener down says
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def hang_up(self) -> None:
        """Accept no more connections, and end those that were accepted."""
        self.close()
        for connection in list(self._let_in):
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close this process's copies of the parent's sockets, after a fork."""
        for one in (*self._sockets, *self._let_in):
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._ended.is_set():
                    return
                _log.warning("a connection could not be accepted, trying again: %s", error)
                self._ended.wait(RETRY_SECONDS)
                continue
            if _of_another_user(connection):
                connection.close()
                continue
            try:
                threading.Thread(
                    target=self._welcome, args=(connection,), name="m2flow connection", daemon=True
                ).start()
            except RuntimeError as error:  # no more threads
                _log.warning("a connection was turned away: %s", error)
                connection.close()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            prepare(connection)
            prove(connection, self._key, accepting=True)
        except OSError as error:
            connection.close()
            _log.debug("a stranger was turned away: %s", error)
            return
        self._let_in.add(connection)
        try:
            self._serve(connection)
        finally:
            self._let_in.discard(connection)


def family_of(address: str | tuple[str, int]) -> socket.AddressFamily:
    """The family of the sockets that an address is for."""
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _abandon_all() -> None:
    """Close all listeners in a forked child: their sockets would look alive as long as it lives."""
    for one in list(_listeners):
        one.abandon()
    _listeners.clear()


os.register_at_fork(after_in_child=_abandon_all)
