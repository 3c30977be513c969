"""A client's connection to a channel's host: one request at a time, with a deadline.

A connection that fails in the middle of a request is closed, never used again: the host then
forgets the request, or puts back the items that it had handed out.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.runtime.transport import listening
from m2flow.runtime.transport.channel.errors import ChannelLost, ChannelTimeout
from m2flow.runtime.transport.channel.host import ChannelAddress, Operation, this_machine
from m2flow.runtime.transport.channel.state import Outcome
from m2flow.runtime.transport.frame import Frame, FrameQueue, FrameStream

_NOTHING = pickle.dumps({}, 5)

ANSWER_SECONDS = 30.0
"""Longest that the host may take to answer, after what the request itself may wait."""


@dataclass(frozen=True, slots=True)
class ChannelRequest:
    """A question to the host; `timeout` is how long it may wait there, in seconds."""

    kind: str
    key: str | int | None
    timeout: float
    settings: dict[str, Any]
    buffers: Sequence[Any] = ()

    def frame(self) -> Frame:
        return Frame(self.kind, pickle.dumps(self.settings, 5), self.buffers)


class ChannelReply:
    """The host's answer.

    Attributes:
        outcome: what became of the request.
        waited: seconds.
        stats: what the channel holds, if that was asked for or is of use.
        counts: how many buffers each item has.
    """

    def __init__(self, frame: Frame) -> None:
        said = pickle.loads(frame.head)
        self.outcome, self.waited = Outcome(frame.kind), said["waited"]
        self.stats, self.counts = said["stats"], said["counts"]
        self._buffers = frame.buffers

    def items(self) -> list[Any]:
        """The items that came; their tensors are views of the memory in which they came."""
        rest = iter(self._buffers)
        return [_unpacked([next(rest) for _ in range(count)]) for count in self.counts]


class Client:
    """Connects at once; raises `ChannelLost` where nobody answers to the address."""

    def __init__(self, address: ChannelAddress) -> None:
        self.address = address
        near = address.machine == this_machine()
        try:
            if not near and address.endpoint.tcp is None:
                raise ConnectionRefusedError(
                    "it listens on its own machine: give it listen=ADDRESS"
                )
            connection = listening.connect(address.endpoint, address.secret, same_node=near)
        except OSError as error:
            raise self._lost(error) from error
        self._socket, self._stream = connection, FrameStream(connection)

    def close(self) -> None:
        """Let go; the host drops what is under way."""
        self._stream.close()

    def ask(self, request: ChannelRequest) -> ChannelReply:
        """Send a request and wait for its answer."""
        self._stream.deadline = self._stream.clock() + request.timeout + ANSWER_SECONDS
        try:
            self._stream.send(request.frame())
            return self._acknowledged(self._stream.receive())
        except TimeoutError:
            raise self._no_answer(request) from None
        except OSError as error:
            raise self._lost(error) from error

    async def ask_async(self, request: ChannelRequest) -> ChannelReply:
        """`ask` for an event loop. When cancelled, close the connection: nothing is swallowed."""
        queue, frames = FrameQueue(self._socket), list[Frame]()
        try:
            async with asyncio.timeout(request.timeout + ANSWER_SECONDS):
                queue.send(request.frame())
                while queue.unsent:
                    await _ready(self._socket, write=True)
                    queue.flush()
                while not frames:
                    await _ready(self._socket, write=False)
                    frames = queue.take()
            return self._acknowledged(frames[0])
        except TimeoutError:
            raise self._no_answer(request) from None
        except OSError as error:
            raise self._lost(error) from error

    def _acknowledged(self, frame: Frame) -> ChannelReply:
        reply = ChannelReply(frame)
        if reply.counts:
            self._stream.send(Frame(Operation.TOOK, _NOTHING))
        return reply

    def _lost(self, error: OSError) -> ChannelLost:
        where = self.address.endpoint.tcp or "its own machine"
        return ChannelLost(
            f"channel {self.address.name!r}: its host on {where} cannot be reached ({error}); "
            "it has ended, or the network is down"
        )

    def _no_answer(self, request: ChannelRequest) -> ChannelTimeout:
        return ChannelTimeout(
            f"channel {self.address.name!r}: its host has not answered within "
            f"{request.timeout + ANSWER_SECONDS:g} s, {ANSWER_SECONDS:g} s more than the "
            f"{request.kind} may wait; whether it was done is not known"
        )


async def _ready(connection: socket.socket, *, write: bool) -> None:
    """Wait until a socket can be read from, or written to."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    add, remove = (
        (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    )
    add(connection, ready.set)
    try:
        await ready.wait()
    finally:
        remove(connection)


# --- items as buffers ---------------------------------------------------------------------------

_PLAIN = (bytes, str, int, float, bool, type(None))
"""Types that hold no tensor, so that nothing that knows tensors has to be loaded for them."""


def packed(value: Any) -> list[Any]:
    """A value as a pickled head and the memory of its tensors and arrays.

    Raises:
        TypeError: something in the value cannot be pickled.
    """
    if type(value) in _PLAIN:
        return [pickle.dumps(value, 5)]
    from m2flow.runtime.transport import wire

    head, buffers, _ = wire.pack(value)
    return [head, *(buffer.memory() for buffer in buffers)]


def _unpacked(buffers: Sequence[Any]) -> Any:
    head, *memory = buffers
    if not memory:
        return pickle.loads(head)
    from m2flow.runtime.transport import wire

    return wire.unpack(head, memory)
