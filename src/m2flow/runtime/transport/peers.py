"""`Peers`: asks `PayloadServer`s for payloads, without the controller.

A peer that is gone is a `PeerLost` at once and for good; nothing reconnects by itself. One
connection carries one request at a time, so that each needs no bookkeeping; threads that fetch at
once use one each. How a connection ends says what becomes of shared memory: see `FrameKind`. Where
CUDA IPC turns out not to work, the payload is asked for again by way of host memory, and so is
every later one of that peer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import secrets
import threading
import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from m2flow.runtime.transport.cargo import together
from m2flow.runtime.transport.cuda_ipc import CudaIPC, LinkRefused
from m2flow.runtime.transport.frame import Frame, FrameStream
from m2flow.runtime.transport.handshake import KeyRefused
from m2flow.runtime.transport.listening import connect, this_machine
from m2flow.runtime.transport.peering import FrameKind, Location, PeerAddress, PeerLost
from m2flow.runtime.transport.server import DeviceOffer
from m2flow.runtime.transport.shared_memory import SharedHandle, SharedReader
from m2flow.runtime.transport.table import CUDA_IPC
from m2flow.runtime.transport.wire import pack, unpack

NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS)
"""Errors of a process that may open no more."""

FAREWELL_SECONDS = 1.0
"""Longest that saying farewell may take."""

_log = logging.getLogger(__name__)


class Received(NamedTuple):
    """A value, and how it came.

    Attributes:
        value: the payload.
        link: by which link; that of the device part, where that had one of its own.
    """

    value: Any
    link: str


class Peers:
    """Asks PayloadServers for payloads. Thread-safe.

    Args:
        node: the name of this machine; servers with the same name share its /dev/shm.
        key: what the servers ask for.
        name: what people call this process.
        devices: what it has of its GPU.

    Attributes:
        location: where it runs.
        devices: what it has of its GPU, or None.
        refused: peers to which CUDA IPC does not work.
        reader: of shared memory.
    """

    def __init__(
        self,
        node: str | None,
        key: bytes,
        *,
        name: str = "a peer",
        devices: CudaIPC | None = None,
    ) -> None:
        self.node = node or this_machine()
        self.devices = devices
        self.location = Location(name, self.node, None if devices is None else devices.gpu)
        self.refused: set[PeerAddress] = set()
        self.reader = SharedReader()
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._key = key
        self._idle: dict[PeerAddress, list[FrameStream]] = {}
        self._lost: dict[PeerAddress, str] = {}
        self._lock = threading.Lock()
        # Close the connections even where `close` is never called.
        self._end = weakref.finalize(self, _say_farewell, self._idle)

    def fetch(self, address: PeerAddress, key: Any, **how: Any) -> Any:
        """The payload of a key, alone; arguments and errors are those of `receive`."""
        return self.receive(address, key, **how).value

    def receive(
        self,
        address: PeerAddress,
        key: Any,
        *,
        timeout: float,
        device: str | torch.device | None = None,
    ) -> Received:
        """The payload of a key, and how it came; by `shared`, it must not be changed in place.

        Args:
            address: who has it.
            key: what its `provide` understands; picklable.
            timeout: seconds for all of it, connecting included.
            device: where tensors go that stood on an accelerator.

        Raises:
            PeerLost: the peer is gone.
            TimeoutError: no answer in time; the peer may be asked again.
            KeyRefused: the keys differ.
            Exception: whatever `provide` raised.
        """
        stream = self._connection(address, timeout)
        stream.deadline = stream.clock() + timeout
        try:
            frame = self._exchanged(stream, address, key)
            try:
                return self._received(frame, device)
            except LinkRefused as error:
                self._refuse(frame, address, error)
            return self._received(self._exchanged(stream, address, key), device)
        finally:
            if not stream.closed:
                with self._lock:
                    self._idle.setdefault(address, []).append(stream)

    def keep(self, addresses: Collection[PeerAddress]) -> None:
        """Close the connections to all other peers, and let go of shared memory that they had.

        Nobody will ask them any more.
        """
        with self._lock:
            gone = {peer: self._idle.pop(peer) for peer in self._idle.keys() - set(addresses)}
        _say_farewell(gone)
        self.reader.let_go()

    def close(self) -> None:
        """Close all connections. Values that were fetched stay valid."""
        with self._lock:
            _say_farewell(self._idle)
        self.reader.close()

    def _exchanged(self, stream: FrameStream, address: PeerAddress, key: Any) -> Frame:
        """Send a request and wait for its answer. Where that fails, the stream is closed."""
        began, asked = stream.clock(), False
        try:
            packed = pack((key, address in self.refused))
            assert not packed.buffers, f"a key holds no tensors: {key!r}"
            stream.send(Frame(FrameKind.REQUEST, packed.head))
            asked = True
            return stream.receive()
        except TimeoutError:
            taken = stream.clock() - began
            self._abandon(stream, asked=asked)
            raise TimeoutError(f"no answer about {key!r} from {address} in {taken:.3g} s") from None
        except OSError as error:
            stream.close()
            raise self._lose(address, error) from error
        except BaseException:  # an interrupt: the answer will come, and nobody read it
            self._abandon(stream, asked=asked)
            raise

    def _received(self, frame: Frame, device: str | torch.device | None) -> Received:
        match frame.kind:
            case FrameKind.ERROR:
                raise pickle.loads(frame.head)
            case FrameKind.SHARED:
                handle = SharedHandle.from_bytes(frame.head)
                return Received(self.reader.read(handle, device=device), frame.kind)
            case FrameKind.STREAM:
                return Received(unpack(frame.head, frame.buffers, device=device), frame.kind)
            case FrameKind.DEVICE:
                return self._taken(frame, device)
        raise AssertionError(f"no answer is a {frame.kind}")

    # --- device memory ----------------------------------------------------------------------------

    def _taken(self, frame: Frame, device: str | torch.device | None) -> Received:
        """The value of an answer whose device part goes by CUDA IPC."""
        assert self.devices is not None, "this process has said that it has no GPU"
        offer: DeviceOffer = pickle.loads(frame.head)
        head, *host = frame.buffers
        pieces = self.devices.take(offer.handles, offer.holder)
        buffers = together(offer.places, host, pieces)
        value = unpack(memoryview(head), buffers, device=device)
        return Received(value, CUDA_IPC)

    def _refuse(self, frame: Frame, address: PeerAddress, error: LinkRefused) -> None:
        """Ask for no other offer of this peer."""
        offer: DeviceOffer = pickle.loads(frame.head)
        text = "no %s from %s to %s, host memory is used from now on: %s"
        _log.warning(text, CUDA_IPC, offer.holder.name, self.location.name, str(error))
        self.refused.add(address)

    # --- connections ------------------------------------------------------------------------------

    def _connection(self, address: PeerAddress, timeout: float) -> FrameStream:
        with self._lock:
            if address in self._lost:
                raise PeerLost(f"{address} was lost before: {self._lost[address]}")
            if idle := self._idle.get(address):
                return idle.pop()
        near = address.node == self.node
        try:
            connection = connect(address.endpoint, self._key, same_node=near, seconds=timeout)
            stream = FrameStream(connection)
            stream.send(Frame(FrameKind.HELLO, pickle.dumps((self.name, self.location))))
        except KeyRefused:
            raise
        except TimeoutError as error:
            raise TimeoutError(f"{address} did not answer in {timeout:g} s") from error
        except OSError as error:
            if error.errno in NO_FILES:  # of this process: the peer may be well
                raise
            raise self._lose(address, error) from error
        return stream

    def _lose(self, address: PeerAddress, error: BaseException) -> PeerLost:
        why = str(error) or type(error).__name__
        with self._lock:
            self._lost[address] = why
            streams = self._idle.pop(address, [])
        _say_farewell({address: streams})
        return PeerLost(f"{address} is gone: {why}")

    @staticmethod
    def _abandon(stream: FrameStream, *, asked: bool) -> None:
        """Leave a connection; where nothing was asked, what was received before stays in use."""
        stream.deadline = stream.clock() + FAREWELL_SECONDS
        with contextlib.suppress(OSError):  # then it is as if this process had died: as good
            stream.send(Frame(FrameKind.ABANDONED if asked else FrameKind.DONE))
        stream.close()


def _say_farewell(idle: dict[PeerAddress, list[FrameStream]]) -> None:
    for streams in idle.values():
        for stream in streams:
            with contextlib.suppress(OSError):  # the peer went first
                stream.deadline = stream.clock() + FAREWELL_SECONDS
                stream.send(Frame(FrameKind.DONE))
            stream.close()
    idle.clear()
