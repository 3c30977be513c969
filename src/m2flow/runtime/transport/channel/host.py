"""The host of a channel: moves frames between connections and a `ChannelState`.

Each connection has a thread, and one request at a time: a put, a get, stats or close. A client says
nothing while its request waits, so if its connection can be read then, it has gone, and the request
is dropped. Items that were handed over are acknowledged by one more frame, `took`, which has no
answer; a client that vanishes before that gives them back. The buffers of a frame are the items' as
they came: the host unpickles settings, never an item.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from m2flow.runtime.transport.channel.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
)
from m2flow.runtime.transport.channel.state import ChannelRequest, ChannelState, Outcome
from m2flow.runtime.transport.frame import Frame, FrameStream, LineClosed
from m2flow.runtime.transport.listening import Listener, ListenerAddress, this_machine

LONGEST_POLL = 3600.0
"""Seconds that are waited at a time."""


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a channel is hosted, and the secret that a connection must know.

    Attributes:
        name: the channel's, for messages.
        machine: the machine and network namespace in which its Unix socket can be reached.
        endpoint: its sockets.
        secret: known to handles only.
        max_items, max_bytes: its bounds.
    """

    name: str
    machine: str
    endpoint: ListenerAddress
    secret: bytes = field(repr=False)
    max_items: int
    max_bytes: int


class Host:
    """Serves one channel until `stop`.

    Args:
        name: the channel's.
        max_items, max_bytes: its bounds.
        listen: the address to be reached at from other machines; None: from this one only.
    """

    def __init__(self, name: str, max_items: int, max_bytes: int, listen: str | None) -> None:
        self._state = ChannelState(max_items, max_bytes)
        self._lock = threading.Lock()
        secret = secrets.token_bytes(32)
        self._listener = Listener(secret, listen, self._serve)
        endpoint = self._listener.endpoint
        self.address = ChannelAddress(name, this_machine(), endpoint, secret, max_items, max_bytes)

    def stop(self) -> None:
        """Close the connections of all requests that wait."""
        self._listener.hang_up()

    def _serve(self, connection: socket.socket) -> None:
        client = _Client(connection, FrameStream(connection), os.eventfd(0))
        try:
            while True:
                self._handle(client, client.stream.receive())
        except OSError:
            pass  # the client has gone
        finally:
            self._change(self._state.drop, client.request)
            os.close(client.bell)
            connection.close()

    def _handle(self, client: _Client, frame: Frame) -> None:
        """Do what a frame asks for, and answer."""
        if frame.kind == "took":
            self._change(self._state.acknowledge, client.request)
            client.request = ChannelRequest()  # its items are let go of
            return
        said, began = pickle.loads(frame.head), time.monotonic()
        request = client.request = ChannelRequest(said["key"], wake=client.wake)
        match frame.kind:
            case "put":
                request.weight, request.body = said["weight"], frame.buffers
                request.num_bytes = sum(map(len, frame.buffers))
                self._await(client, began + said["timeout"])
            case "get":
                request.weight, request.max_items = said["weight"], said["max_items"]
                request.enough_at = began + said["linger"]
                self._await(client, began + said["timeout"])
            case "close":
                with self._lock:
                    self._state.close(began)
        client.stream.send(self._answer(frame.kind, request, time.monotonic() - began))
        if not request.items:
            client.request = ChannelRequest()  # else the connection would keep an item

    def _await(self, client: _Client, deadline: float) -> None:
        """Begin a request, and wait until it has ended, by its deadline if nothing else comes."""
        request = client.request
        self._change(self._state.begin, request)
        poll = select.poll()
        poll.register(client.connection, select.POLLIN)
        poll.register(client.bell, select.POLLIN)
        while request.outcome is None:
            now = time.monotonic()
            if now >= deadline:
                self._change(self._state.give_up, request)
                break
            enough = now >= request.enough_at
            until = deadline if enough else min(deadline, request.enough_at)
            ready = dict(poll.poll(1000 * min(until - now, LONGEST_POLL)))
            if client.connection.fileno() in ready:
                raise LineClosed("the client has gone")
            if client.bell in ready:
                os.eventfd_read(client.bell)
            elif not enough:
                with self._lock:
                    self._state.settle(time.monotonic())

    def _change(
        self, act: Callable[[ChannelRequest, float], None], request: ChannelRequest
    ) -> None:
        with self._lock:
            act(request, time.monotonic())

    def _answer(self, kind: str, request: ChannelRequest, waited: float) -> Frame:
        """Build the answer to a request: its items, the channel's statistics, or an error."""
        if request.outcome not in (None, Outcome.DONE):
            return Frame("error", pickle.dumps(self._failed(kind, request, waited), 5))
        said: object = [len(item.body) for item in request.items]
        if kind == "stats":
            with self._lock:
                said = self._state.stats()
        buffers = [buffer for item in request.items for buffer in item.body]
        return Frame("done", pickle.dumps(said, 5), buffers)

    def _failed(self, kind: str, request: ChannelRequest, waited: float) -> ChannelError:
        key, most = request.key, self.address
        where = f"channel {most.name!r}" + ("" if key is None else f", key {key!r}")
        if request.outcome is Outcome.CLOSED:
            rest = "it takes no more items" if kind == "put" else "and nothing is left"
            return ChannelClosed(f"{where}: closed, {rest}")
        with self._lock:
            stats = self._state.stats()
        held = (
            f"after {waited:.3g} s; the channel holds {stats.items} of {most.max_items} "
            f"items, {stats.bytes:,} of {most.max_bytes:,} bytes, under keys {list(stats.keys)}; "
            f"{stats.waiting_putters} other putters and {stats.waiting_getters} getters wait"
        )
        if request.outcome is Outcome.FULL:
            return ChannelFull(f"{where}: no room for {request.num_bytes:,} bytes {held}")
        found = stats.keys.get(key, 0)
        missing = "no item" if not found else f"only {found} items, not a whole batch,"
        return ChannelEmpty(f"{where}: {missing} {held}")


@dataclass(slots=True)
class _Client:
    """One connection, the eventfd that wakes its thread, and the newest request on it."""

    connection: socket.socket
    stream: FrameStream
    bell: int
    request: ChannelRequest = field(default_factory=ChannelRequest)

    def wake(self) -> None:
        os.eventfd_write(self.bell, 1)


class HostActor:
    """The Ray actor that hosts one channel."""

    def __init__(self, name: str, max_items: int, max_bytes: int) -> None:
        self._host = Host(name, max_items, max_bytes, node_address())

    def address(self) -> ChannelAddress:
        """The address of the channel."""
        return self._host.address


def node_address() -> str | None:
    """This node's address in the Ray cluster, if this process is in one of several nodes."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    alive = sum(node["Alive"] for node in ray.nodes())
    return str(ray.util.get_node_ip_address()) if alive > 1 else None
