"""The host of a channel: one thread, one selector, and no thought of what the bodies mean.

It moves bytes between sockets and a `ChannelState` and keeps its deadlines. A client that vanishes
is dropped from the state, which gives back what it was handed and had not acknowledged. Requests
are small and rare enough for one thread; bodies are received where they stay and sent from there.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections import deque
from typing import Any

from m2flow.runtime.transport.channel.memory import SpareMemory
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
from m2flow.runtime.transport.channel.state import Answer, ChannelState, Item, Outcome


class _Client:
    """A connection: what has come in of its next message, and what has yet to go out."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.trusted = False
        self.expected_proof = b""
        self.received = bytearray()
        self.header: tuple[Any, ...] = ()
        self.key = ""
        self.body: memoryview | None = None  # of a request that is on its way
        self.filled = 0
        self.unsent: deque[Any] = deque()
        self.lent: tuple[Item, ...] = ()  # handed over, and not acknowledged


class Host:
    """Serves one channel until `stop`.

    Args:
        name: the channel's.
        max_items, max_bytes: its bounds.
        listen: the address to be reached at from other machines; None: from this one only.
    """

    def __init__(self, name: str, max_items: int, max_bytes: int, listen: str | None) -> None:
        self._state = ChannelState(max_items, max_bytes)
        self._secret = secrets.token_bytes(32)
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local_name = f"m2flow-channel-{secrets.token_hex(12)}"
        local.bind("\0" + local_name)
        listeners, remote = [local], None
        if listen is not None:
            listeners.append(socket.create_server((listen, 0)))
            remote = (listen, listeners[1].getsockname()[1])
        self._poll = select.epoll()
        self._listeners = {listener.fileno(): listener for listener in listeners}
        for listener in listeners:
            listener.listen(128)
            listener.setblocking(False)
            self._poll.register(listener, select.EPOLLIN)
        self._clients: dict[int, _Client] = {}
        self._spare = SpareMemory()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._wake = os.eventfd(0)
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread: threading.Thread | None = None
        _hosts.add(self)
        self.address = Address(
            name, this_machine(), local_name, remote, self._secret, max_items, max_bytes
        )

    def start(self) -> None:
        """Serve in a thread that does not keep the process alive."""
        self._thread = threading.Thread(
            target=self.serve, name=f"channel {self.address.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End `serve`; whoever waits loses the connection."""
        if self._thread is not None and self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._thread = None

    def _abandon(self) -> None:
        """In a forked child: let go of what is the parent's, which still serves it."""
        for client in self._clients.values():
            client.socket.close()
        for listener in self._listeners.values():
            listener.close()
        self._poll.close()
        os.close(self._wake)

    def serve(self, ends_with: int | None = None) -> None:
        """Serve until `stop`, or until the file descriptor `ends_with` reaches its end."""
        last = {self._wake}
        if ends_with is not None:
            self._poll.register(ends_with, select.EPOLLIN)
            last.add(ends_with)
        try:
            while True:
                due = self._state.next_deadline - time.monotonic()
                events = self._poll.poll(max(0.0, due) if due < 1e6 else None)
                for number, event in events:
                    if number in last:
                        return
                    self._on_event(number, event)
                self._deliver(self._state.expire(time.monotonic()))
        finally:
            _hosts.discard(self)
            self._abandon()

    # --- sockets ----------------------------------------------------------------------------------

    def _on_event(self, number: int, event: int) -> None:
        if number in self._listeners:
            self._accept(self._listeners[number])
            return
        client = self._clients.get(number)
        if client is None:  # closed by an earlier event of this round
            return
        try:
            if event & select.EPOLLOUT:
                self._flush(client)
                if not client.unsent:
                    self._poll.modify(number, select.EPOLLIN)
            if event & ~select.EPOLLOUT:
                self._receive(number, client)
        except BlockingIOError:  # a false alarm
            return
        except OSError:  # reset, broken pipe: the client is gone
            self._drop(number)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # gone before it was let in
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients[connection.fileno()] = _Client(connection)
        self._poll.register(connection, select.EPOLLIN)

    def _drop(self, number: int) -> None:
        client = self._clients.pop(number)
        self._poll.unregister(number)
        client.socket.close()
        self._deliver(self._state.drop(number, time.monotonic()))

    def _receive(self, number: int, client: _Client) -> None:
        if client.body is not None:
            count = client.socket.recv_into(client.body[client.filled :])
            client.filled += count
            if count and client.filled == len(client.body):
                body, client.body = client.body, None
                self._handle(number, client, body)
        else:
            count = client.socket.recv_into(self._scratch)
            client.received += self._scratch[:count]
            while number in self._clients and self._take_message(number, client):
                pass
        if not count and number in self._clients:
            self._drop(number)

    def _take_message(self, number: int, client: _Client) -> bool:
        """Act on the first message that has come in; False if it is not complete yet."""
        received = client.received
        if not client.trusted:
            return self._shake_hands(number, client)
        if len(received) < REQUEST.size:
            return False
        header = REQUEST.unpack_from(received)
        start = REQUEST.size + header[1]
        if len(received) < start:
            return False
        client.header = header
        client.key = received[REQUEST.size : start].decode()
        num_bytes = header[6]
        if num_bytes > self._state.max_bytes:  # no client of ours asks for that
            self._drop(number)
            return False
        present = min(num_bytes, len(received) - start)
        body = self._spare.take(num_bytes)
        body[:present] = memoryview(received)[start : start + present]
        del received[: start + present]
        if present < num_bytes:
            client.body, client.filled = body, present
            return False
        self._handle(number, client, body)
        return True

    def _shake_hands(self, number: int, client: _Client) -> bool:
        """Prove that we know the secret, then see that the client does."""
        if not client.expected_proof:
            if len(client.received) < HELLO_BYTES:
                return False
            hello = bytes(client.received[:HELLO_BYTES])
            del client.received[:HELLO_BYTES]
            ours = secrets.token_bytes(HELLO_BYTES)
            client.expected_proof = proof(self._secret, b"client", hello, ours)
            self._send(number, client, [ours + proof(self._secret, b"host", hello, ours)])
            return True
        if len(client.received) < PROOF_BYTES:
            return False
        shown = bytes(client.received[:PROOF_BYTES])
        del client.received[:PROOF_BYTES]
        client.trusted = hmac.compare_digest(shown, client.expected_proof)
        if not client.trusted:
            self._drop(number)
        return client.trusted

    def _send(self, number: int, client: _Client, parts: list[Any]) -> None:
        """Send now what the kernel takes, and the rest when it can be written."""
        waits_already = bool(client.unsent)
        client.unsent += parts
        if not waits_already:
            self._flush(client)
            if client.unsent:
                self._poll.modify(number, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, client: _Client) -> None:
        unsent = client.unsent
        while unsent:
            parts = [unsent[index] for index in range(min(MOST_PARTS, len(unsent)))]
            try:
                sent = client.socket.sendmsg(parts)
            except BlockingIOError:
                return
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.popleft())
            if sent:
                unsent[0] = memoryview(unsent[0])[sent:]

    # --- requests ---------------------------------------------------------------------------------

    def _handle(self, number: int, client: _Client, body: memoryview) -> None:
        operation, _, max_items, timeout, weight, linger, _ = client.header
        state, key, now = self._state, client.key, time.monotonic()
        match operation:
            case Operation.PUT:
                item = Item(body, weight, len(body))
                self._deliver(state.put(number, key, item, timeout, now))
            case Operation.GET:
                bounds = {"weight": weight, "max_items": max_items, "linger": linger}
                self._deliver(state.get(number, key, timeout, now, **bounds))
            case Operation.ACKNOWLEDGE:
                for item in client.lent:
                    self._spare.give_back(item.body)
                client.lent = ()
                self._deliver(state.acknowledge(number, now))
            case Operation.PEEK:
                self._reply(number, self._peek(number, key))
            case Operation.STATS:
                self._reply(number, Answer(number, Outcome.DONE, 0.0), self._stats())
            case Operation.CLOSE:
                self._deliver(state.close(now))
                self._reply(number, Answer(number, Outcome.DONE, 0.0))
            case _:
                self._drop(number)

    def _deliver(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.items:
                self._clients[answer.ticket].lent = answer.items
            stuck = answer.outcome in (Outcome.FULL, Outcome.EMPTY)
            try:
                self._reply(answer.ticket, answer, self._stats() if stuck else b"")
            except OSError:
                self._drop(answer.ticket)

    def _reply(self, number: int, answer: Answer, note: bytes = b"") -> None:
        items = answer.items
        parts: list[Any] = [note]
        if items:
            table = b"".join(SIZE.pack(item.num_bytes) for item in items)
            parts = [table.ljust(aligned(len(table)), b"\0")]
            for item in items:
                parts += [item.body, bytes(aligned(item.num_bytes) - item.num_bytes)]
        num_bytes = sum(map(len, parts))
        parts[0] = REPLY.pack(answer.outcome, len(items), answer.waited, num_bytes) + parts[0]
        if num_bytes < SCRATCH_BYTES:
            parts = [b"".join(parts)]
        self._send(number, self._clients[number], [part for part in parts if len(part)])

    def _peek(self, number: int, key: str) -> Answer:
        item = self._state.peek(key)
        if item is None:
            return Answer(number, Outcome.EMPTY, 0.0)
        copy = Item(bytes(item.body), item.weight, item.num_bytes)  # it may be taken meanwhile
        return Answer(number, Outcome.DONE, 0.0, (copy,))

    def _stats(self) -> bytes:
        state = self._state
        putters, getters = state.waiting
        return json.dumps(
            {
                "items": state.num_items,
                "bytes": state.num_bytes,
                "put": state.num_put,
                "taken": state.num_taken,
                "most_items": state.most_items,
                "most_bytes": state.most_bytes,
                "waiting_putters": putters,
                "waiting_getters": getters,
                "closed": state.closed,
                "keys": [[json.loads(str(key)), n] for key, n in state.sizes().items()],
            }
        ).encode()


_hosts: weakref.WeakSet[Host] = weakref.WeakSet()


def _abandon_all() -> None:
    """Else a socket whose host has died would look alive for as long as a forked child lives."""
    for host in list(_hosts):
        host._abandon()
    _hosts.clear()


os.register_at_fork(after_in_child=_abandon_all)
