"""The host of a channel: one thread, one selector, and no thought of what items mean.

It moves frames between connections and a `ChannelState` and keeps its deadlines. A client has one
request on its way at a time. A reply that hands over items is acknowledged with one more,
unanswered frame; a client that vanishes before that gives them back. The buffers of a frame are the
items' as they came: the host unpickles settings, never an item.
"""

from __future__ import annotations

import os
import pickle
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from m2flow.runtime.transport.channel.state import ChannelState, Item, Outcome, Verdict
from m2flow.runtime.transport.frame import Frame, FrameQueue, LineClosed
from m2flow.runtime.transport.listening import Endpoint, Listener


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a channel is hosted, and what it takes to be let in.

    Attributes:
        name: the channel's, for messages.
        machine: the machine and network namespace in which its Unix socket can be reached.
        endpoint: its sockets.
        secret: known to handles only.
        max_items, max_bytes: its bounds.
    """

    name: str
    machine: str
    endpoint: Endpoint
    secret: bytes = field(repr=False)
    max_items: int
    max_bytes: int


class Operation:
    """Kinds of requests. TOOK acknowledges items, and has no reply."""

    PUT, GET, TOOK, PEEK, STATS, CLOSE = "put", "get", "took", "peek", "stats", "close"


def this_machine() -> str:
    """Differs between machines, and between network namespaces of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


class Host:
    """Serves one channel until `stop`.

    Args:
        name: the channel's.
        max_items, max_bytes: its bounds.
        listen: the address to be reached at from other machines; None: from this one only.
    """

    def __init__(self, name: str, max_items: int, max_bytes: int, listen: str | None) -> None:
        self._state = ChannelState(max_items, max_bytes)
        self._clients: dict[int, FrameQueue] = {}  # by ticket
        self._tickets = count()
        self._came: deque[socket.socket] = deque()
        self._wake = os.eventfd(0)
        weakref.finalize(self, os.close, self._wake)  # not before: other threads write to it
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        secret = secrets.token_bytes(32)
        self._listener = Listener(secret, listen, self._let_in)
        endpoint = self._listener.endpoint
        self.address = ChannelAddress(name, this_machine(), endpoint, secret, max_items, max_bytes)
        _hosts.add(self)

    def start(self) -> None:
        """Serve in a thread that does not keep the process alive."""
        self._thread = threading.Thread(
            target=self.serve, name=f"channel {self.address.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End `serve`; whoever waits loses the connection."""
        if self._thread is not None and self._thread.is_alive():
            self._stopped = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()

    def serve(self, ends_with: int | None = None) -> None:
        """Serve until `stop`, or until the file descriptor `ends_with` reaches its end."""
        if ends_with is not None:
            self._selector.register(ends_with, selectors.EVENT_READ)
        try:
            while not self._stopped:
                due = self._state.next_deadline - time.monotonic()
                for key, events in self._selector.select(max(0.0, due) if due < 1e6 else None):
                    if key.fd == ends_with:
                        return
                    if key.fd == self._wake:
                        self._welcome()
                    elif key.data in self._clients:
                        self._attend(key.data, events)
                if time.monotonic() >= self._state.next_deadline:
                    self._deliver(self._state.expire(time.monotonic()))
        finally:
            _hosts.discard(self)
            self._listener.close()
            self.abandon()

    def abandon(self) -> None:
        """Close what is this process's of the connections; a forked child does it to its copies."""
        for client in self._clients.values():
            client.close()
        for connection in self._came:
            connection.close()
        self._selector.close()

    # --- connections ------------------------------------------------------------------------------

    def _let_in(self, connection: socket.socket) -> None:
        self._came.append(connection)
        os.eventfd_write(self._wake, 1)

    def _welcome(self) -> None:
        os.eventfd_read(self._wake)
        while self._came:
            ticket = next(self._tickets)
            self._clients[ticket] = FrameQueue(self._came.popleft())
            self._selector.register(self._clients[ticket], selectors.EVENT_READ, ticket)

    def _attend(self, ticket: int, events: int) -> None:
        client = self._clients[ticket]
        try:
            if events & selectors.EVENT_WRITE:
                client.flush()
                if not client.unsent:
                    self._selector.modify(client, selectors.EVENT_READ, ticket)
            if events & selectors.EVENT_READ:
                for frame in client.take():
                    self._handle(ticket, frame)
        except LineClosed:
            self._drop(ticket)

    def _drop(self, ticket: int) -> None:
        client = self._clients.pop(ticket, None)
        if client is not None:
            self._selector.unregister(client)
            client.close()
            self._deliver(self._state.drop(ticket, time.monotonic()))

    # --- requests ---------------------------------------------------------------------------------

    def _handle(self, ticket: int, frame: Frame) -> None:
        state, now = self._state, time.monotonic()
        said: dict[str, Any] = pickle.loads(frame.head)
        match frame.kind:
            case Operation.PUT:
                size = sum(map(len, frame.buffers))
                item = Item(frame.buffers, said["weight"], size)
                self._deliver(state.put(ticket, said["key"], item, said["timeout"], now))
            case Operation.GET:
                self._deliver(state.get(ticket, now=now, **said))
            case Operation.TOOK:
                self._deliver(state.acknowledge(ticket, now))
            case Operation.PEEK:
                item_there = state.peek(said["key"])
                items = () if item_there is None else (item_there,)
                outcome = Outcome.DONE if items else Outcome.EMPTY
                self._reply(Verdict(ticket, outcome, 0.0, items))
            case Operation.STATS:
                self._reply(Verdict(ticket, Outcome.DONE, 0.0), stats=True)
            case Operation.CLOSE:
                self._deliver([*state.close(now), Verdict(ticket, Outcome.DONE, 0.0)])

    def _deliver(self, answers: Sequence[Verdict]) -> None:
        for answer in answers:
            try:
                self._reply(answer, stats=answer.outcome in (Outcome.FULL, Outcome.EMPTY))
            except LineClosed:
                self._drop(answer.ticket)

    def _reply(self, answer: Verdict, *, stats: bool = False) -> None:
        """Operation what came of a request, and if asked for what the channel holds."""
        client = self._clients.get(answer.ticket)
        if client is None:
            return
        said = {
            "waited": answer.waited,
            "counts": [len(item.body) for item in answer.items],
            "stats": self._state.stats() if stats else None,
        }
        buffers = [buffer for item in answer.items for buffer in item.body]
        client.send(Frame(answer.outcome.value, pickle.dumps(said, 5), buffers))
        if client.unsent:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(client, both, answer.ticket)


_hosts: weakref.WeakSet[Host] = weakref.WeakSet()


def _abandon_all() -> None:
    """Else a socket whose host has ended would look alive as long as a forked child lives."""
    for host in list(_hosts):
        host.abandon()
    _hosts.clear()


os.register_at_fork(after_in_child=_abandon_all)
