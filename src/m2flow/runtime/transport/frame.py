"""Frames: the one format of the messages that cross between processes, on any stream socket.

A frame is a kind, a head and buffers. On the wire stand a fixed prefix, the sizes of the buffers,
the head, and the buffers, each aligned to `ALIGNMENT`, so that what arrives can be viewed as
elements of any type where it lies. `FrameStream` blocks, with a deadline for a whole message
however slowly it comes in.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes at whose multiples what is joined in one piece of memory begins."""

LONGEST_KIND = 16
LONGEST_WAIT = 1e6
"""Seconds for which a socket is waited for at a time: its timer has milliseconds in 32 bits."""

JOINED_BYTES = 32 << 10
"""A smaller frame goes out as one piece of memory: a copy costs less than a longer list."""

_PREFIX = struct.Struct("<16sQQQ")  # kind, bytes of the head, number of buffers, bytes that follow
_READ_AHEAD = 64 << 10
_MOST_PIECES = 1000  # the system takes 1024 pieces in one call
_PADDING = bytes(ALIGNMENT)


class LineClosed(ConnectionError):
    """The other end of a connection is gone."""


class BadFrame(LineClosed):
    """What came in is no frame: nothing that follows on the connection can be read."""


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

    def pieces(self) -> deque[memoryview]:
        """What goes out, in order."""
        kind, head = self.kind.encode(), self.head
        assert len(kind) <= LONGEST_KIND, kind
        if not self.buffers:
            pieces = [_PREFIX.pack(kind, len(head), 0, len(head)), head]
            total = len(head)
        else:
            sizes = [len(one) for one in self.buffers]
            lead = 8 * len(sizes) + len(head)
            total = aligned(lead) + sum(map(aligned, sizes))
            prefix = _PREFIX.pack(kind, len(head), len(sizes), total)
            pieces = [prefix, struct.pack(f"<{len(sizes)}Q", *sizes), head]
            pieces.append(_PADDING[: aligned(lead) - lead])
            for size, memory in zip(sizes, self.buffers, strict=True):
                pieces += (memory, _PADDING[: aligned(size) - size])
        if total <= JOINED_BYTES:
            return deque([memoryview(b"".join(pieces))])
        return deque(memoryview(piece) for piece in pieces if len(piece))


def _checked(kind: bytes, head: int, count: int, follows: int) -> None:
    """Raises BadFrame: no frame has such a prefix."""
    lead = 8 * count + head
    fits = aligned(lead) <= follows if count else head == follows
    if not fits or not kind.isascii():
        raise BadFrame(f"a prefix of no frame: {kind!r}, {head}, {count}, {follows}")


def _frame(kind: bytes, head: int, count: int, memory: memoryview) -> Frame:
    """The frame of a prefix and the memory that follows it. Raises BadFrame: it is none."""
    name = kind.rstrip(b"\0").decode()
    if not count:
        return Frame(name, memory)
    sizes = struct.unpack_from(f"<{count}Q", memory)
    starts = list(accumulate(map(aligned, sizes), initial=aligned(8 * count + head)))
    if starts[-1] != len(memory):
        raise BadFrame(f"buffers of a {name!r} that end at {starts[-1]} of {len(memory)} bytes")
    buffers = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return Frame(name, memory[8 * count : 8 * count + head], buffers)


class FrameDecoder:
    """Puts frames together from the bytes of a stream; large ones are received where they stay."""

    def __init__(self) -> None:
        self._scratch = bytearray(_READ_AHEAD)
        self._view = memoryview(self._scratch)
        self._end = 0  # of what has come in: of the scratch, or of the large frame
        self._large: tuple[bytes, int, int, memoryview] | None = None

    def room(self) -> memoryview:
        """Return the memory for the next bytes; call `add` with the number of bytes received."""
        return (self._view if self._large is None else self._large[3])[self._end :]

    def add(self, count: int) -> list[Frame]:
        """Take in so many received bytes. Returns the frames that they complete.

        Raises:
            BadFrame: they are no frames, or of a size that no memory has.
        """
        self._end += count
        if self._large is not None:
            if self._end < len(self._large[3]):
                return []
            frame, self._large, self._end = _frame(*self._large), None, 0
            return [frame]
        frames: list[Frame] = []
        start = 0
        while (begin := start + _PREFIX.size) <= self._end:
            kind, head, number, follows = _PREFIX.unpack_from(self._scratch, start)
            _checked(kind, head, number, follows)
            stop = begin + follows
            if stop <= self._end:
                own = memoryview(self._scratch[begin:stop])
                frames.append(_frame(kind, head, number, own))
                start = stop
            elif _PREFIX.size + follows <= _READ_AHEAD:
                break
            else:
                memory = _memory(follows)
                self._end -= begin
                memory[: self._end] = self._view[begin : begin + self._end]
                self._large = kind, head, number, memory
                return frames
        self._end -= start
        if start and self._end:
            self._view[: self._end] = self._view[start : start + self._end]
        return frames


def _memory(size: int) -> memoryview:
    try:
        return memoryview(np.empty(size, np.uint8).data)
    except (MemoryError, ValueError) as error:
        raise BadFrame(f"no memory for a frame of {size} bytes") from error


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
        self._decoder = FrameDecoder()
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
                drop_sent(pieces, self._socket.sendmsg(first_pieces(pieces)))
            except OSError as error:
                if self._waits_on(error):
                    continue
                raise what_failed(error) from error

    def receive(self) -> Frame:
        """The next frame; raises as `send` does."""
        while not self._frames:
            self._arm()
            try:
                count = self._socket.recv_into(self._decoder.room())
            except OSError as error:
                if self._waits_on(error):
                    continue
                raise what_failed(error) from error
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

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self._socket.close()

    def _arm(self) -> None:
        """Let the next system call end at the deadline."""
        if self.deadline is None:
            return
        left = self.deadline - self.clock()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(min(left, LONGEST_WAIT))

    def _waits_on(self, error: OSError) -> bool:
        """Whether the socket was waited for as long as can be, and the deadline has not passed."""
        over = isinstance(error, TimeoutError) and error.errno is None
        return over and self.deadline is not None and self.clock() < self.deadline


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT


def first_pieces(pieces: deque[memoryview]) -> list[memoryview]:
    """Return as many pieces as one system call takes."""
    return [pieces[number] for number in range(min(len(pieces), _MOST_PIECES))]


def drop_sent(pieces: deque[memoryview], sent: int) -> None:
    """Remove the bytes that were sent."""
    while pieces and sent >= len(pieces[0]):
        sent -= len(pieces.popleft())
    if sent:
        pieces[0] = pieces[0][sent:]


def what_failed(error: OSError) -> OSError:
    """Translate a socket's error: a TimeoutError at our own deadline, else LineClosed.

    The kernel reports a machine that answers no more as ETIMEDOUT, which Python makes the same
    exception as a deadline.
    """
    if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
        return error
    return LineClosed(str(error) or type(error).__name__)
