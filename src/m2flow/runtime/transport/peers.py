"""`Peers`: asks `PayloadServer`s for payloads, without the controller.

A peer that is gone is a `PeerLost` at once and for good; nothing reconnects by itself. One
connection carries one request at a time, so that each needs no bookkeeping; threads that fetch at
once use one each. How a connection ends says what becomes of shared memory: see `Farewell`. Where a
link between devices turns out not to work, the payload is asked for again by way of host memory,
and so is every later one of that peer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from m2flow.runtime.transport.devices import Devices, LinkRefused, LinkStalled, Standing
from m2flow.runtime.transport.messages import JOINED_BYTES, Frame, Wire
from m2flow.runtime.transport.peering import (
    About,
    Farewell,
    LinkUnavailable,
    PeerAddress,
    PeerLost,
    TestPayload,
    TokenLink,
    authenticate,
    this_node,
)
from m2flow.runtime.transport.server import Offer, PayloadServer
from m2flow.runtime.transport.shared_memory import SharedHandle, SharedReader
from m2flow.runtime.transport.table import LinkTable
from m2flow.runtime.transport.wire import unpack

__all__ = [
    "LinkUnavailable",
    "PayloadServer",
    "PeerAddress",
    "PeerLost",
    "Peers",
    "Received",
    "TestPayload",
    "TokenLink",
    "this_node",
]

_log = logging.getLogger(__name__)


class Received(NamedTuple):
    """A value, and how it came.

    Attributes:
        value: the payload.
        link: by which link; that of the device part, where that had one of its own.
        nbytes: its size as it was packed; 0 where it was not.
    """

    value: Any
    link: str
    nbytes: int


class Peers:
    """Asks PayloadServers for payloads. Thread-safe.

    Args:
        node: the name of this machine; servers with the same name share its /dev/shm.
        authkey: what the servers ask for.
        table: measured costs; with a hint of the size, the asker's own choice goes first.
        links: further links by name, as the servers have them.
        name: what people call this process.
        devices: what it has of its GPU.

    Attributes:
        standing: where it stands.
        devices: what it has of its GPU, or None.
        refused: links between devices that do not work, by peer and link, and why.
    """

    def __init__(
        self,
        node: str | None,
        authkey: bytes,
        table: LinkTable | None = None,
        *,
        links: Mapping[str, TokenLink] | None = None,
        name: str = "a peer",
        devices: Devices | None = None,
    ) -> None:
        self.node = node or this_node()
        self.devices = devices
        self.standing = Standing(name, self.node, None if devices is None else devices.gpu)
        self.refused: dict[PeerAddress, dict[str, str]] = {}
        self.table = table
        self.reader = SharedReader()
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._authkey = authkey
        self._links = dict(links or {})
        self._idle: dict[PeerAddress, list[Wire]] = {}
        self._lost: dict[PeerAddress, str] = {}
        self._lock = threading.Lock()
        # Close the connections even where `close` is never called.
        self._end = weakref.finalize(self, _say_farewell, self._idle)

    def fetch(
        self,
        address: PeerAddress,
        key: Any,
        *,
        timeout: float,
        nbytes_hint: int | None = None,
        link: str | None = None,
        device: str | torch.device | None = None,
    ) -> Any:
        """The payload of a key. What came by `shared` must not be changed in place.

        Args:
            address: who has it.
            key: what its `provide` understands; picklable.
            timeout: seconds for all of it, connecting included.
            nbytes_hint: its size, where the asker knows it.
            link: demand this link, instead of the fastest.
            device: where tensors go that stood on an accelerator.

        Raises:
            PeerLost: the peer is gone.
            TimeoutError: no answer in time; the peer may be asked again.
            AuthenticationError: the keys differ.
            LinkUnavailable: the demanded link does not exist here.
            LinkStalled: a transfer between devices did not end in time.
            Exception: whatever `provide` raised.
        """
        return self.receive(
            address, key, timeout=timeout, nbytes_hint=nbytes_hint, link=link, device=device
        ).value

    def receive(
        self,
        address: PeerAddress,
        key: Any,
        *,
        timeout: float,
        nbytes_hint: int | None = None,
        link: str | None = None,
        device: str | torch.device | None = None,
    ) -> Received:
        """As `fetch`, and how it came."""
        near = address.node == self.node
        if link is None and nbytes_hint is not None and self.table is not None:
            ways = {"stream", *self._links}  # whether there is a pool, only it knows
            best = self.table.choose("node" if near else "cluster", nbytes_hint, {"shared", *ways})
            link = best if best in ways else None
        first = Frame.of_object("request", (key, link, self.refused.get(address, {})))
        wire = self._connection(address, timeout, near=near)
        wire.deadline = wire.clock() + timeout
        try:
            return self._asked(wire, address, key, first, link, device)
        finally:
            if not wire.closed:
                with self._lock:
                    self._idle.setdefault(address, []).append(wire)

    def forget(self, address: PeerAddress) -> None:
        """Close the connections to a peer; it may be asked again, as if for the first time."""
        with self._lock:
            self._lost.pop(address, None)
            wires = self._idle.pop(address, [])
        _say_farewell({address: wires})

    def close(self) -> None:
        """Close all connections. Values that were fetched stay valid."""
        with self._lock:
            _say_farewell(self._idle)
        self.reader.close()

    def _asked(
        self,
        wire: Wire,
        address: PeerAddress,
        key: Any,
        request: Frame,
        link: str | None,
        device: str | torch.device | None,
    ) -> Received:
        """Ask until an answer can be used: each time that one is refused, without its link."""
        while True:
            frame = self._exchanged(wire, address, request, key)
            try:
                return self._received(frame, wire, address, device)
            except LinkStalled:
                self._abandon(wire)
                raise
            except LinkRefused as error:
                kind = self._refuse(frame, wire, address, error)
                if kind == link:
                    why = f"there is no link {kind!r} to {self.standing.name}: {error}"
                    raise LinkUnavailable(why) from error
            request = Frame.of_object("request", (key, link, self.refused[address]))

    def _exchanged(self, wire: Wire, address: PeerAddress, request: Frame, key: Any) -> Frame:
        """Send a request and wait for its answer. Where that fails, the wire is closed."""
        began = wire.clock()
        try:
            wire.send(request)
            frame = wire.receive()
            while frame.kind == About.FAILED:  # of a transfer that this side gave up before
                frame = wire.receive()
            return frame
        except TimeoutError:
            taken = wire.clock() - began
            self._abandon(wire)
            raise TimeoutError(f"no answer about {key!r} from {address} in {taken:.3g} s") from None
        except (OSError, EOFError) as error:
            wire.close()
            raise self._lose(address, error) from error
        except BaseException:  # an interrupt: the answer will come, and nobody read it
            self._abandon(wire)
            raise

    def _received(
        self, frame: Frame, wire: Wire, address: PeerAddress, device: str | torch.device | None
    ) -> Received:
        if frame.kind == "error":
            raise frame.object()
        if frame.kind == "shared":
            handle = SharedHandle.from_bytes(frame.head)
            return Received(self.reader.read(handle, device=device), "shared", handle.nbytes)
        if frame.kind == "stream":
            value = unpack(frame.head, frame.memory, device=device)
            small = frame.nbytes <= JOINED_BYTES
            return Received(value, "inline" if small else "stream", frame.nbytes)
        if frame.kind == "device":
            return self._taken(frame, wire, address, device)
        value = self._links[frame.kind].get(frame.object(), wire.seconds())
        return Received(value, frame.kind, 0)

    # --- device memory ----------------------------------------------------------------------------

    def _taken(
        self, frame: Frame, wire: Wire, address: PeerAddress, device: str | torch.device | None
    ) -> Received:
        """The value of an answer whose device part has a link of its own."""
        assert self.devices is not None, "this process has said that it stands on no GPU"
        offer: Offer = pickle.loads(frame.head)
        head: Any
        host: Sequence[Any]
        if offer.shared is None:
            head, *host = frame.memory
        else:
            head, host = self.reader.parts(SharedHandle.from_bytes(offer.shared))
        link, talk = self.devices.links[offer.kind], _Talk(self, wire, address)
        pieces = link.take(offer.token, offer.manifest.sizes, offer.holder, talk)
        together = offer.manifest.together(host, pieces)
        value = unpack(memoryview(head), together, device=device)
        nbytes = len(head) + sum(map(len, host)) + offer.manifest.nbytes
        return Received(value, offer.kind, nbytes)

    def _refuse(self, frame: Frame, wire: Wire, address: PeerAddress, error: LinkRefused) -> str:
        """Have the offer withdrawn, and ask for no other of this kind; which kind it is."""
        offer: Offer = pickle.loads(frame.head)
        text = "no %s from %s to %s, host memory is used from now on: %s"
        _log.warning(text, offer.kind, offer.holder.name, self.standing.name, str(error))
        self.refused[address] = {**self.refused.get(address, {}), offer.kind: str(error)}
        try:
            wire.send(Frame.of_object(About.REFUSED, error.taken))
        except TimeoutError:
            self._abandon(wire)
            raise LinkStalled(str(error)) from None
        except OSError as lost:
            wire.close()
            raise self._lose(address, lost) from lost
        return offer.kind

    def _connection(self, address: PeerAddress, timeout: float, *, near: bool) -> Wire:
        with self._lock:
            if address in self._lost:
                raise PeerLost(f"{address} was lost before: {self._lost[address]}")
            idle = self._idle.get(address)
            if idle:
                return idle.pop()
        connection = socket.socket(socket.AF_UNIX if near else socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(address.unix if near else address.tcp)
            authenticate(connection, self._authkey, timeout, asking=True)
            wire = Wire(connection)
            wire.send(Frame.of_object("hello", (self.name, self.standing)))
            return wire
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{address} did not answer in {timeout} s") from error
            if isinstance(error, OSError | EOFError):
                raise self._lose(address, error) from error
            raise

    def _lose(self, address: PeerAddress, error: BaseException) -> PeerLost:
        why = str(error) or type(error).__name__
        with self._lock:
            self._lost[address] = why
            wires = self._idle.pop(address, [])
        _say_farewell({address: wires})
        return PeerLost(f"{address} is gone: {why}")

    @staticmethod
    def _abandon(wire: Wire) -> None:
        wire.deadline = wire.clock() + 1.0
        with contextlib.suppress(OSError):  # then it is as if this process had died: as good
            wire.send(Frame(Farewell.ABANDONED, b""))
        wire.close()


class _Talk:
    """A request's line to the one who answers, for a link that has questions of its own."""

    def __init__(self, peers: Peers, wire: Wire, address: PeerAddress) -> None:
        self._peers, self._wire, self._address = peers, wire, address

    def ask(self, message: Any) -> Any:
        request = Frame.of_object(About.PROCEED, message)
        reply = self._peers._exchanged(self._wire, self._address, request, message)
        value = reply.object()
        if reply.kind == "error":
            raise value
        return value

    def seconds(self) -> float:
        return self._wire.seconds()

    def check(self) -> None:
        match self._wire.comes_next():
            case "":
                self._wire.close()
                raise self._peers._lose(self._address, EOFError("the connection has ended"))
            case About.FAILED:
                raise LinkRefused(str(self._wire.receive().object()))


def _say_farewell(idle: dict[PeerAddress, list[Wire]]) -> None:
    for wires in idle.values():
        for wire in wires:
            with contextlib.suppress(OSError):  # the peer went first
                wire.deadline = wire.clock() + 1.0
                wire.send(Frame(Farewell.DONE, b""))
            wire.close()
    idle.clear()
