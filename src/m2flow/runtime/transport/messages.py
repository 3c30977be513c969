"""Messages on a socket: a kind, a head and raw buffers, sent in one vectored call.

The buffers of a small message go in one piece and stay in one; large ones are received straight
into the memory in which they stay. A deadline holds for a whole message, however slow it drips in.
"""

from __future__ import annotations

import io
import math
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from m2flow.runtime.transport.buffers import ALIGNMENT, Memory
from m2flow.runtime.transport.wire import Packed, pack, unpack

_PREFIX = struct.Struct("<16sQI")  # kind, bytes of the head, number of buffers
_LONGEST_KIND = 16
_MOST_PIECES = 1000  # the system takes 1024 pieces in one call
_READ_AHEAD = 64 << 10
JOINED_BYTES = 32 << 10
"""Up to so many bytes of buffers travel as one piece."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Attributes:
        kind: at most 16 ASCII letters.
        head: a packed value's head.
        memory: its buffers.
    """

    kind: str
    head: bytes | bytearray
    memory: Sequence[Memory] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of head and buffers."""
        return len(self.head) + sum(map(len, self.memory))

    @classmethod
    def of_packed(cls, kind: str, packed: Packed) -> Frame:
        """A message with a packed value."""
        return cls(kind, packed.head, [buffer.memory() for buffer in packed.buffers])

    @classmethod
    def of_object(cls, kind: str, value: Any) -> Frame:
        """A message with any value that can be packed."""
        return cls.of_packed(kind, pack(value))

    def object(self) -> Any:
        """The value; its tensors are views of the message's memory."""
        return unpack(self.head, self.memory)


class Wire:
    """A connected stream socket that carries frames.

    Attributes:
        deadline: when sending or receiving gives up with a TimeoutError, by `clock`; None: never.
        closed: whether this side has closed it.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, connection: socket.socket) -> None:
        self.deadline: float | None = None
        self.closed = False
        self._socket = connection
        self._patient = True
        self._at_end = False
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(None)
        self._reader = io.BufferedReader(_Source(self), _READ_AHEAD)

    def send(self, frame: Frame) -> None:
        """Send a frame, or raise OSError (TimeoutError at the deadline)."""
        assert len(frame.kind) <= _LONGEST_KIND, frame.kind
        sizes = [len(one) for one in frame.memory]
        prefix = _PREFIX.pack(frame.kind.encode(), len(frame.head), len(sizes))
        start = [prefix, struct.pack(f"<{len(sizes)}Q", *sizes), frame.head]
        if sum(sizes) <= JOINED_BYTES:
            for memory in frame.memory:
                start += (memory.tobytes(), bytes(-len(memory) % ALIGNMENT))
            pieces = [memoryview(b"".join(start))]
        else:
            pieces = [memoryview(b"".join(start)), *(one.data for one in frame.memory)]
        while pieces:
            self.arm()
            sent = self._socket.sendmsg(pieces[:_MOST_PIECES])
            done = 0
            while done < len(pieces) and sent >= len(pieces[done]):
                sent -= len(pieces[done])
                done += 1
            del pieces[:done]
            if sent:
                pieces[0] = pieces[0][sent:]

    def receive(self) -> Frame:
        """The next frame; EOFError where the stream has ended, TimeoutError at the deadline."""
        kind, head_bytes, count = _PREFIX.unpack(self._read(_PREFIX.size))
        sizes = struct.unpack(f"<{count}Q", self._read(8 * count)) if count else ()
        head = self._read(head_bytes)
        name = kind.rstrip(b"\0").decode()
        if sum(sizes) > JOINED_BYTES:
            return Frame(name, head, [self._fill(np.empty(size, np.uint8)) for size in sizes])
        starts = [0, *accumulate(size + -size % ALIGNMENT for size in sizes)]
        joined = self._fill(np.empty(starts[-1], np.uint8))
        return Frame(
            name, head, [joined[at : at + size] for at, size in zip(starts, sizes, strict=False)]
        )

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self._socket.close()

    def seconds(self) -> float:
        """What is left until the deadline, not below 0; infinite without one."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - self.clock())

    def comes_next(self) -> str | None:
        """The kind of a frame that has come unasked; "" if the other side is gone, None if nothing
        has come. Waits for nothing."""
        self._patient = False
        try:
            kind = self._reader.peek(_LONGEST_KIND)[:_LONGEST_KIND]
        except OSError:
            return ""
        finally:
            self._patient = True
        if len(kind) == _LONGEST_KIND:
            return kind.rstrip(b"\0").decode()
        return "" if self._at_end and not kind else None

    def arm(self) -> None:
        """Let the next system call end at the deadline."""
        if self.deadline is None:
            self._socket.settimeout(None)
            return
        left = self.deadline - self.clock()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(left)

    def receive_some(self, target: memoryview) -> int | None:
        """Receive at least a byte into `target`; 0 at the end of the stream."""
        if self._patient:
            self.arm()
            return self._socket.recv_into(target)
        self._socket.settimeout(0)
        try:
            count = self._socket.recv_into(target)
        except BlockingIOError:
            return None
        self._at_end = count == 0
        return count

    def _read(self, nbytes: int) -> bytearray:
        target = bytearray(nbytes)
        self._fill(target)
        return target

    def _fill(self, target: Any) -> Any:
        left = memoryview(target)
        while left:
            count = self._reader.readinto(left)
            if not count:
                raise EOFError("the connection has ended")
            left = left[count:]
        return target


class _Source(io.RawIOBase):
    """What the buffered reader reads from."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int | None:
        return self._wire.receive_some(target)
