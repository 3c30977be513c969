"""Frames: the one format of the messages that cross between processes, on any stream socket.

A frame is a kind, a head and buffers. On the wire stand a fixed prefix, the sizes of the buffers,
the head, and the buffers, each padded to `ALIGNMENT`, so that what arrives can be viewed as
elements of any type where it lies. `FrameStream` blocks, with a deadline for a whole message
however slowly it comes in; `FrameQueue` never blocks and is for a selector. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

ALIGNMENT = 64
LONGEST_KIND = 16
JOINED_BYTES = 32 << 10
"""A smaller frame goes out as one piece of memory: a copy costs less than a longer list."""

LARGE_BYTES = 1 << 18
"""From here on memory comes from `mmap`, which aligns it and does not write zeros first."""

_PREFIX = struct.Struct("<16sQIxxxxQ")  # kind, bytes of the head, number of buffers, of their bytes
_READ_AHEAD = 64 << 10
_MOST_PIECES = 1000  # the system takes 1024 pieces in one call
_PADDING = bytes(ALIGNMENT)


class LineClosed(ConnectionError):
    """The other end of a connection is gone."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Attributes:
        kind: at most 16 ASCII letters.
        head: bytes.
        buffers: flat memory of bytes; what was received can be written to.
    """

    kind: str
    head: Any = b""
    buffers: Sequence[Any] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of head and buffers."""
        return len(self.head) + sum(map(len, self.buffers))

    def pieces(self) -> deque[memoryview]:
        """What goes out, in order."""
        sizes = [len(one) for one in self.buffers]
        body = sum(map(_padded, sizes))
        assert len(self.kind) <= LONGEST_KIND, self.kind
        prefix = _PREFIX.pack(self.kind.encode(), len(self.head), len(sizes), body)
        pieces = [prefix, struct.pack(f"<{len(sizes)}Q", *sizes), self.head]
        for size, memory in zip(sizes, self.buffers, strict=True):
            pieces += (memory, _PADDING[: _padded(size) - size])
        if len(self.head) + body <= JOINED_BYTES:
            return deque([memoryview(b"".join(pieces))])
        return deque(memoryview(piece) for piece in pieces if len(piece))


class _Decoder:
    """Puts frames together from the bytes of a stream; large parts are received where they stay."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(_READ_AHEAD))
        self._parts: list[memoryview] = []  # what is complete of: prefix, sizes and head, body
        self._part = memoryview(bytearray(_PREFIX.size))
        self._filled = 0

    def room(self) -> memoryview:
        """Where the next bytes go; tell `add` how many came."""
        missing = len(self._part) - self._filled
        return self._part[self._filled :] if missing >= _READ_AHEAD else self._scratch

    def add(self, count: int) -> list[Frame]:
        """Take the bytes that came; the frames that are complete with them."""
        came = self._scratch[:count]
        if len(self._part) - self._filled >= _READ_AHEAD:
            self._filled += count
            came = came[:0]
        frames: list[Frame] = []
        while True:
            start = self._filled
            self._filled = min(len(self._part), start + len(came))
            taken = self._filled - start
            self._part[start : self._filled] = came[:taken]
            came = came[taken:]
            if self._filled < len(self._part):
                return frames
            self._parts.append(self._part)
            self._filled = 0
            _, head, count, body = _PREFIX.unpack(self._parts[0])
            match len(self._parts):
                case 1:
                    self._part = new_memory(8 * count + head)
                case 2:
                    self._part = new_memory(body)
                case _:
                    frames.append(_frame(*self._parts))
                    self._parts, self._part = [], memoryview(bytearray(_PREFIX.size))


def _frame(prefix: memoryview, lead: memoryview, body: memoryview) -> Frame:
    kind, _, count, _ = _PREFIX.unpack(prefix)
    sizes = struct.unpack_from(f"<{count}Q", lead)
    starts = accumulate(map(_padded, sizes), initial=0)
    buffers = [body[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return Frame(kind.rstrip(b"\0").decode(), lead[8 * count :], buffers)


class FrameStream:
    """A connected socket on which frames are sent and received in order. Closes it in the end.

    One thread at a time sends, and one at a time receives.

    Attributes:
        deadline: when sending and receiving give up with a TimeoutError, by `clock`; None: never.
        closed: whether this side has closed it.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self.deadline: float | None = None
        self.closed = False
        self._socket = connection
        self._decoder = _Decoder()
        self._frames: deque[Frame] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            LineClosed: the other end is gone.
            TimeoutError: the deadline has passed.
        """
        pieces = frame.pieces()
        while pieces:
            self._arm()
            try:
                _drop(pieces, self._socket.sendmsg(_first(pieces)))
            except OSError as error:
                raise _meant(error) from error

    def receive(self) -> Frame:
        """The next frame; raises as `send` does."""
        while not self._frames:
            self._arm()
            try:
                count = self._socket.recv_into(self._decoder.room())
            except OSError as error:
                raise _meant(error) from error
            if not count:
                raise LineClosed("the connection has ended")
            self._frames += self._decoder.add(count)
        return self._frames.popleft()

    def waiting(self, seconds: float = 0.0) -> bool:
        """Whether a frame, or a part of one, has come in or comes within so many seconds."""
        return bool(self._frames) or bool(self._poll.poll(1000 * seconds))

    def await_end(self) -> None:
        """Wait until the other end is closed, whatever is still to be received."""
        end = select.poll()
        end.register(self._socket, select.POLLRDHUP)
        end.poll()

    def break_off(self) -> None:
        """End the connection under a thread that sends or receives: it gets a LineClosed."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self._socket.close()

    def seconds(self) -> float:
        """What is left until the deadline, not below 0; infinite without one."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - self.clock())

    def _arm(self) -> None:
        """Let the next system call end at the deadline."""
        if self.deadline is None:
            return
        left = self.seconds()
        if not left:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(left)


class FrameQueue:
    """The end of a connection that never waits: what does not go out at once is queued.

    Attributes:
        unsent: whether something is queued; `flush` sends it when the socket can be written.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._pieces: deque[memoryview] = deque()
        self._decoder = _Decoder()

    def fileno(self) -> int:
        """For a selector; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        return bool(self._pieces)

    def send(self, frame: Frame) -> None:
        """Send a frame, now or as soon as there is room. Raises LineClosed: the other end is gone.

        Its buffers must not change until then.
        """
        waits = self.unsent
        self._pieces += frame.pieces()
        if not waits:
            self.flush()

    def flush(self) -> None:
        """Send what there is room for. Raises LineClosed: the other end is gone."""
        while self._pieces:
            try:
                _drop(self._pieces, self._socket.sendmsg(_first(self._pieces)))
            except BlockingIOError:
                return
            except OSError as error:
                raise _meant(error) from error

    def take(self) -> list[Frame]:
        """The frames that have come in whole.

        Raises:
            LineClosed: the other end is gone, and nothing that it sent is left to be taken.
        """
        frames: list[Frame] = []
        while not frames:
            try:
                count = self._socket.recv_into(self._decoder.room())
            except BlockingIOError:
                break
            except OSError as error:
                raise _meant(error) from error
            if not count:
                raise LineClosed("it closed its line")
            frames += self._decoder.add(count)
        return frames

    def close(self) -> None:
        """Close the socket; what is queued is lost."""
        self._socket.close()


def new_memory(num_bytes: int) -> memoryview:
    """Memory that can be written to, in huge pages where it is large and the kernel has them."""
    if num_bytes < LARGE_BYTES:
        return memoryview(bytearray(num_bytes))
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT


def _first(pieces: deque[memoryview]) -> list[memoryview]:
    return [pieces[number] for number in range(min(len(pieces), _MOST_PIECES))]


def _drop(pieces: deque[memoryview], sent: int) -> None:
    """Remove what was sent."""
    while pieces and sent >= len(pieces[0]):
        sent -= len(pieces.popleft())
    if sent:
        pieces[0] = pieces[0][sent:]


def _meant(error: OSError) -> OSError:
    """What an error of the socket means: a deadline of ours, or the end of the connection.

    The kernel reports a machine that answers no more as ETIMEDOUT, which Python makes the same
    exception as a deadline.
    """
    if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
        return error
    return LineClosed(str(error) or type(error).__name__)
