"""Control lines: a connection from the launcher to a lane for commands and reports.

A line carries byte strings in order. The lane's end blocks; the launcher's end never does, so that
a lane which is busy, or which is writing itself, cannot hold the launcher up. The launcher's end
asks `on_silence` about a lane that says nothing for long: a lane that is gone looks like a busy one
until then.
"""

from __future__ import annotations

import queue
import socket
import time
from collections import deque
from collections.abc import Callable

from m2flow.runtime.transport import listening
from m2flow.runtime.transport.frame import (
    Frame,
    FrameDecoder,
    FrameStream,
    LineClosed,
    drop_sent,
    first_pieces,
    what_failed,
)
from m2flow.runtime.transport.listening import Listener, ListenerAddress

__all__ = ["LauncherLine", "Line", "LineClosed", "ListenerAddress", "Waiting", "connect"]

SILENCE_SECONDS = 5.0
"""So long a lane may say nothing before `on_silence` is asked, and again after as long."""


class Waiting:
    """The lane's side before the launcher has come.

    Args:
        host: the address of this machine by which others reach it; None for this machine alone.
        key: the run's secret.

    Attributes:
        address: where the launcher may come.
    """

    def __init__(self, host: str | None, key: bytes) -> None:
        self._came: queue.Queue[socket.socket] = queue.Queue()
        self._listener = Listener(key, host, self._came.put)
        self.address = self._listener.endpoint

    def accept(self, seconds: float) -> Line:
        """Wait for the launcher: the first connection that knows the key. Returns the line to it.

        Raises:
            TimeoutError: nobody did in time.
        """
        try:
            return Line(_patient(self._came.get(timeout=seconds)))
        except queue.Empty:
            raise TimeoutError(f"no launcher has come within {seconds:g} s") from None
        finally:
            self._listener.close()


def connect(
    address: ListenerAddress, key: bytes, *, same_node: bool, seconds: float
) -> LauncherLine:
    """The launcher's end of a line to a lane.

    Raises:
        OSError: the lane does not answer, or has another key.
    """
    there = listening.connect(address, key, same_node=same_node, seconds=seconds)
    return LauncherLine(_patient(there))


def _patient(connection: socket.socket) -> socket.socket:
    """Have the system wait for a peer that reads nothing for long, since it is at work.

    Of a machine that is gone keepalive tells where nothing is on its way there, and Ray does
    (`on_silence`).
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    return connection


class Line:
    """A lane's end: it waits for messages, and sends whole ones. See `FrameStream`."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = FrameStream(connection)
        self.waiting, self.await_end = self._stream.waiting, self._stream.await_end
        self.close = self._stream.close

    def send(self, message: bytes) -> None:
        """Send a message; one thread at a time. Raises LineClosed: the launcher is gone."""
        self._stream.send(Frame("line", message))

    def receive(self) -> memoryview:
        """The next message. Raises LineClosed: the launcher is gone."""
        message: memoryview = self._stream.receive().head
        return message


class LauncherLine:
    """The launcher's end: nothing here waits. What does not go out at once is queued.

    Attributes:
        on_silence: says why the lane is gone, or None if it is not known to be.
    """

    def __init__(
        self, connection: socket.socket, clock: Callable[[], float] = time.monotonic
    ) -> None:
        connection.setblocking(False)
        self.on_silence: Callable[[], str | None] = lambda: None
        self._socket = connection
        self._pieces: deque[memoryview] = deque()
        self._decoder = FrameDecoder()
        self._clock, self._heard = clock, clock()

    def fileno(self) -> int:
        """For a selector; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether bytes are left that the lane has had no room for; `flush` sends them."""
        return bool(self._pieces)

    def send(self, message: bytes) -> None:
        """Send a message, now or as soon as there is room. Raises LineClosed: the lane is gone."""
        self.hold(message)
        self.flush()

    def hold(self, message: bytes) -> None:
        """Send a message with the next one, or with `flush`."""
        self._pieces += Frame("line", message).pieces()

    def flush(self) -> None:
        """Send as many queued bytes as the socket takes. Raises LineClosed: the lane is gone."""
        while self._pieces:
            try:
                drop_sent(self._pieces, self._socket.sendmsg(first_pieces(self._pieces)))
            except BlockingIOError:
                return
            except OSError as error:
                raise what_failed(error) from error

    def take(self) -> list[memoryview]:
        """The messages that have come in whole.

        Raises:
            LineClosed: the lane is gone, and nothing that it sent is left to be taken.
        """
        frames: list[Frame] = []
        while not frames:
            try:
                count = self._socket.recv_into(self._decoder.room())
            except BlockingIOError:
                break
            except OSError as error:
                raise what_failed(error) from error
            if not count:
                raise LineClosed("it closed its line")
            frames += self._decoder.add(count)
        self._heard = self._clock()
        return [frame.head for frame in frames]

    def close(self) -> None:
        """Close the socket; what is queued is lost."""
        self._socket.close()

    def check(self) -> None:
        """Ask whether a silent lane still runs; to be called at least every `SILENCE_SECONDS`.

        Raises:
            LineClosed: it is gone.
        """
        if self._clock() - self._heard < SILENCE_SECONDS:
            return
        self._heard = self._clock()
        reason = self.on_silence()
        if reason is not None:
            raise LineClosed(reason)
