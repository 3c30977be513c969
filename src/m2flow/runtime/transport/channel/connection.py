"""A client's connection to a channel's host: one request at a time, with a deadline.

A connection that fails in the middle of a request is closed, never used again: the host then
forgets the request, or puts back the items that it had handed out.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.runtime.transport.channel.errors import ChannelLost, ChannelTimeout
from m2flow.runtime.transport.channel.memory import new_memory
from m2flow.runtime.transport.channel.protocol import (
    HELLO_BYTES,
    MOST_PARTS,
    PROOF_BYTES,
    REPLY,
    REQUEST,
    SCRATCH_BYTES,
    SIZE,
    Address,
    Operation,
    aligned,
    proof,
    this_machine,
)
from m2flow.runtime.transport.channel.state import Outcome

CONNECT_SECONDS = 10.0
"""Longest that a connection may take to be made."""

ANSWER_SECONDS = 30.0
"""Longest that the host may take to answer, after what the request itself may wait."""

_ACKNOWLEDGEMENT = REQUEST.pack(Operation.ACKNOWLEDGE, 0, 0, 0.0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """A question to the host; `timeout` is how long it may wait there, in seconds."""

    operation: Operation
    key: bytes = b""
    timeout: float = 0.0
    weight: float = 0.0
    max_items: int = 0
    linger: float = 0.0
    body: Sequence[Any] = ()
    num_bytes: int = 0

    def parts(self) -> list[Any]:
        header = REQUEST.pack(
            self.operation,
            len(self.key),
            self.max_items,
            self.timeout,
            self.weight,
            self.linger,
            self.num_bytes,
        )
        if self.num_bytes < SCRATCH_BYTES:
            return [b"".join((header, self.key, *self.body))]
        parts = (part if isinstance(part, bytes) else memoryview(part) for part in self.body)
        return [header, self.key, *(part for part in parts if len(part))]


@dataclass(frozen=True, slots=True)
class Reply:
    """The host's answer: the bodies of items, or a note in JSON."""

    outcome: Outcome
    waited: float
    bodies: tuple[memoryview, ...]
    note: memoryview


class Connection:
    """Connects at once; raises `ChannelLost` where nobody answers to the address."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        try:
            self._socket = _connect(address)
            self._shake_hands()
        except OSError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Let go; the host drops what is under way."""
        self._socket.close()

    def ask(self, request: Request) -> Reply:
        """Send a request and wait for its answer."""
        deadline = time.monotonic() + request.timeout + ANSWER_SECONDS
        try:
            self._socket.settimeout(request.timeout + ANSWER_SECONDS)
            parts = request.parts()
            while parts := _rest(parts, self._socket.sendmsg(parts[:MOST_PARTS])):
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            reply = _Incoming(self._scratch)
            while not reply.complete:
                reply.add(self._socket.recv_into(reply.room()))
            return self._acknowledged(reply)
        except TimeoutError:
            raise self._no_answer(request) from None
        except OSError as error:
            raise self._lost(error) from error

    async def ask_async(self, request: Request) -> Reply:
        """`ask` for an event loop. When cancelled, close the connection: nothing is swallowed."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        try:
            async with asyncio.timeout(request.timeout + ANSWER_SECONDS):
                for part in request.parts():
                    await loop.sock_sendall(self._socket, part)
                reply = _Incoming(self._scratch)
                while not reply.complete:
                    reply.add(await loop.sock_recv_into(self._socket, reply.room()))
            return self._acknowledged(reply)
        except TimeoutError:
            raise self._no_answer(request) from None
        except OSError as error:
            raise self._lost(error) from error

    def _acknowledged(self, incoming: _Incoming) -> Reply:
        if incoming.handed_over:
            self._socket.sendall(_ACKNOWLEDGEMENT)
        return incoming.reply()

    def _shake_hands(self) -> None:
        self._socket.settimeout(CONNECT_SECONDS)
        hello = secrets.token_bytes(HELLO_BYTES)
        self._socket.sendall(hello)
        answer = b""
        while len(answer) < HELLO_BYTES + PROOF_BYTES:
            received = self._socket.recv(HELLO_BYTES + PROOF_BYTES - len(answer))
            if not received:
                raise ConnectionResetError("the host hung up")
            answer += received
        theirs, shown = answer[:HELLO_BYTES], answer[HELLO_BYTES:]
        secret = self.address.secret
        if not hmac.compare_digest(shown, proof(secret, b"host", hello, theirs)):
            raise ConnectionRefusedError("somebody else listens there")
        self._socket.sendall(proof(secret, b"client", hello, theirs))

    def _lost(self, error: OSError) -> ChannelLost:
        where = self.address.remote or "its own machine"
        return ChannelLost(
            f"channel {self.address.name!r}: its host on {where} cannot be reached ({error}); "
            "it has ended, or the network is down"
        )

    def _no_answer(self, request: Request) -> ChannelTimeout:
        return ChannelTimeout(
            f"channel {self.address.name!r}: its host has not answered within "
            f"{request.timeout + ANSWER_SECONDS:g} s, {ANSWER_SECONDS:g} s more than the "
            f"{request.operation.name.lower()} may wait; whether it was done is not known"
        )


class _Incoming:
    """A reply that comes in piece by piece."""

    def __init__(self, scratch: memoryview) -> None:
        self._scratch, self._filled = scratch, 0
        self._header: tuple[Any, ...] = ()
        self._body = memoryview(b"")

    def room(self) -> memoryview:
        """Where the next bytes go."""
        target = self._body if self._header else self._scratch
        return target[self._filled :]

    def add(self, count: int) -> None:
        if not count:
            raise ConnectionResetError("the host hung up")
        self._filled += count
        if not self._header and self._filled >= REPLY.size:
            self._header = REPLY.unpack_from(self._scratch)
            self._body = new_memory(self._header[3])
            self._filled -= REPLY.size
            self._body[: self._filled] = self._scratch[REPLY.size :][: self._filled]

    @property
    def complete(self) -> bool:
        return len(self._header) > 0 and self._filled == len(self._body)

    @property
    def handed_over(self) -> bool:
        outcome, count, _, _ = self._header
        return bool(outcome == Outcome.DONE and count)

    def reply(self) -> Reply:
        outcome, count, waited, _ = self._header
        body = self._body
        end = aligned(count * SIZE.size)
        bodies = []
        for index in range(count):
            (size,) = SIZE.unpack_from(body, index * SIZE.size)
            bodies.append(body[end : end + size])
            end += aligned(size)
        return Reply(Outcome(outcome), waited, tuple(bodies), body[end:])


def _connect(address: Address) -> socket.socket:
    """By the unix socket where it can be reached, else by the network."""
    if address.machine == this_machine():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_SECONDS)
            connection.connect("\0" + address.local)
        except OSError:
            connection.close()
            raise
        return connection
    if address.remote is None:
        raise ConnectionRefusedError("it listens on its own machine only: give it listen=ADDRESS")
    connection = socket.create_connection(address.remote, CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _rest(parts: list[Any], sent: int) -> list[Any]:
    """What is left to send."""
    done = 0
    for part in parts:
        if sent < len(part):
            break
        sent -= len(part)
        done += 1
    rest = parts[done:]
    if rest and sent:
        rest[0] = memoryview(rest[0])[sent:]
    return rest
