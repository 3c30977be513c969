"""A client's connection to a channel's host: one request at a time, with a deadline.

A connection that fails in the middle of a request is closed, never used again: the host then
forgets the request, or puts back the items that it had handed out.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import select
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.runtime.transport import listening
from m2flow.runtime.transport.channel.errors import ChannelLost, ChannelTimeout
from m2flow.runtime.transport.channel.host import ChannelAddress, Operation, this_machine
from m2flow.runtime.transport.channel.state import Outcome
from m2flow.runtime.transport.frame import Frame, FrameQueue

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


class ChannelReply:
    """The host's answer.

    Attributes:
        outcome: what became of the request.
        waited: seconds.
        stats: what the channel holds, if that was asked for or is of use.
        counts: how many buffers each item has.
    """

    def __init__(self, frame: Frame) -> None:
        said = json.loads(bytes(frame.head))
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
        self._queue = FrameQueue(connection)

    def close(self) -> None:
        """Let go; the host drops what is under way."""
        self._queue.close()

    def ask(self, request: ChannelRequest) -> ChannelReply:
        """Send a request and wait for its answer."""
        deadline = time.monotonic() + request.timeout + ANSWER_SECONDS
        poll = select.poll()
        conversation = self._conversation(request)
        try:
            while True:
                poll.register(self._queue, next(conversation))
                if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                    raise self._no_answer(request)
        except StopIteration as end:
            return self._acknowledged(end.value)
        except OSError as error:
            raise self._lost(error) from error

    async def ask_async(self, request: ChannelRequest) -> ChannelReply:
        """`ask` for an event loop. When cancelled, close the connection: nothing is swallowed."""
        conversation = self._conversation(request)
        try:
            async with asyncio.timeout(request.timeout + ANSWER_SECONDS):
                while (event := next(conversation, None)) is not None:
                    await _ready(self._queue.fileno(), event)
            return self._acknowledged(self._frame)
        except TimeoutError:
            raise self._no_answer(request) from None
        except OSError as error:
            raise self._lost(error) from error

    def _conversation(self, request: ChannelRequest) -> Generator[int, None, Frame]:
        """Send a request and take the answer; yields the event of `poll` that it waits for."""
        head = json.dumps(request.settings).encode()
        self._queue.send(Frame(request.kind, head, request.buffers))
        while self._queue.unsent:
            yield select.POLLOUT
            self._queue.flush()
        while not (frames := self._queue.take()):
            yield select.POLLIN
        (self._frame,) = frames
        return self._frame

    def _acknowledged(self, frame: Frame) -> ChannelReply:
        reply = ChannelReply(frame)
        if reply.counts:
            self._queue.send(Frame(Operation.TOOK, b"{}"))
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


async def _ready(descriptor: int, event: int) -> None:
    """Wait until a descriptor can be read from, or written to."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    add, remove = (
        (loop.add_reader, loop.remove_reader)
        if event == select.POLLIN
        else (loop.add_writer, loop.remove_writer)
    )
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)


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
