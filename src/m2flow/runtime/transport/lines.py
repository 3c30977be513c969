"""Control lines: a connection from the launcher to a lane for commands and reports.

A line carries frames, each a length and that many bytes, in order, over a Unix socket on one
machine and TCP between machines. Both ends prove that they know the run's key before the first
frame, because frames are unpickled. The lane's end blocks; the launcher's end never does, so that a
lane which is busy, or which is writing itself, cannot hold the launcher up.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path

_LENGTH = struct.Struct("<Q")
_NONCE_BYTES = 32
_READ_BYTES = 1 << 20


class LineClosed(ConnectionError):
    """The other end of a line is gone."""


@dataclass(frozen=True, slots=True)
class LineAddress:
    """Where a lane waits for its launcher.

    Attributes:
        unix: path of the socket for a launcher on the same machine.
        host, port: for one on another machine.
    """

    unix: str
    host: str
    port: int


class Waiting:
    """The lane's side before the launcher has come.

    Args:
        path: of the Unix socket to make.
        host: the address of this machine by which others reach it.
        key: the run's secret.
    """

    def __init__(self, path: Path, host: str, key: bytes) -> None:
        self._key = key
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(path))
        self._tcp = socket.create_server((host, 0))
        self._unix.listen(1)
        self.address = LineAddress(str(path), host, self._tcp.getsockname()[1])

    def accept(self, seconds: float) -> Line:
        """The line to the first that comes and knows the key.

        Raises:
            TimeoutError: nobody did in time.
        """
        try:
            while True:
                ready, _, _ = select.select([self._unix, self._tcp], [], [], seconds)
                if not ready:
                    raise TimeoutError(f"no launcher has come within {seconds:g} s")
                connection, _ = ready[0].accept()
                connection.settimeout(seconds)
                with contextlib.suppress(OSError):
                    _prove(connection, self._key, first=True)
                    return Line(connection)
                connection.close()
        finally:
            self._unix.close()
            self._tcp.close()
            os.unlink(self.address.unix)


def connect(address: LineAddress, key: bytes, *, same_node: bool, seconds: float) -> LauncherLine:
    """The launcher's end of a line to a lane.

    Raises:
        OSError: the lane does not answer, or has another key.
    """
    if same_node:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        connection.connect(address.unix)
    else:
        connection = socket.create_connection((address.host, address.port), timeout=seconds)
    _prove(connection, key, first=False)
    return LauncherLine(connection)


def _prove(connection: socket.socket, key: bytes, *, first: bool) -> None:
    """Each end shows that it knows the key; raises OSError where the other does not."""
    nonce = os.urandom(_NONCE_BYTES)
    connection.sendall(nonce)
    theirs = _exactly(connection, _NONCE_BYTES)
    ours = b"lane" if first else b"launcher"
    other = b"launcher" if first else b"lane"
    connection.sendall(hmac.digest(key, ours + theirs, "sha256"))
    if not hmac.compare_digest(_exactly(connection, 32), hmac.digest(key, other + nonce, "sha256")):
        raise PermissionError("the other end of the line does not know the run's key")
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise LineClosed("the other end of the line is gone")
        view = view[received:]
    return data


class Line:
    """A lane's end: it waits for frames, and sends whole ones."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, frame: bytes) -> None:
        if len(frame) < _READ_BYTES:
            self._connection.sendall(_LENGTH.pack(len(frame)) + frame)
        else:
            self._connection.sendall(_LENGTH.pack(len(frame)))
            self._connection.sendall(frame)

    def receive(self) -> bytearray:
        """The next frame.

        Raises:
            LineClosed: the launcher is gone.
        """
        (length,) = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size))
        return _exactly(self._connection, length)

    def waiting(self, seconds: float = 0.0) -> bool:
        """Whether a frame, or a part of one, is there; waits for it no longer than this."""
        return bool(self._poll.poll(1e3 * seconds))

    def await_end(self) -> None:
        """Wait until the launcher's end is closed, whatever is still to be received."""
        end = select.poll()
        end.register(self._connection, select.POLLRDHUP)
        end.poll()

    def close(self) -> None:
        self._connection.close()


class LauncherLine:
    """The launcher's end: nothing here waits. `fileno` is for a selector.

    Attributes:
        unsent: whether bytes are left that the lane has had no room for; `flush` sends them.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def unsent(self) -> bool:
        return bool(self._outgoing)

    def send(self, frame: bytes) -> None:
        """Send a frame, now or as soon as there is room.

        Raises:
            LineClosed: the lane is gone.
        """
        self._outgoing.append(memoryview(_LENGTH.pack(len(frame)) + frame))
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        while self._outgoing:
            piece = self._outgoing[0]
            try:
                sent = self._connection.send(piece)
            except BlockingIOError:
                return
            except OSError as error:
                raise LineClosed(str(error)) from error
            if sent < len(piece):
                self._outgoing[0] = piece[sent:]
            else:
                self._outgoing.popleft()

    def take(self) -> list[bytes]:
        """The frames that have come in whole.

        Raises:
            LineClosed: the lane is gone, and nothing it sent is left to be taken.
        """
        closed: str | None = None
        while closed is None:
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                closed = str(error)
                break
            self._incoming += data
            if not data:
                closed = "it closed its line"
            elif len(data) < _READ_BYTES:
                break
        frames, start = [], 0
        while len(self._incoming) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            end = start + _LENGTH.size + length
            if end > len(self._incoming):
                break
            frames.append(bytes(self._incoming[start + _LENGTH.size : end]))
            start = end
        del self._incoming[:start]
        if closed is not None and not frames:
            raise LineClosed(closed)
        return frames

    def close(self) -> None:
        self._connection.close()
