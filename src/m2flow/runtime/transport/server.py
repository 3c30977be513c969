"""`PayloadServer`: hands payloads out to the lanes that ask, by the link that fits.

The answering side picks the link, because it knows the size and where the elements lie: `shared` (a
handle into its pool, on one node) or `stream` (raw buffers over the socket, in one piece with the
message where they are small: `inline`). Elements on a GPU go by CUDA IPC to an asker on the same
machine that runs on a GPU too, in the same message as the rest.
"""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from m2flow.runtime.transport.cargo import load
from m2flow.runtime.transport.cuda_ipc import CudaIPC, Handle, LinkRefused, scope_between
from m2flow.runtime.transport.frame import Frame, FrameStream
from m2flow.runtime.transport.listening import LOOPBACK, Listener, this_machine
from m2flow.runtime.transport.peering import FrameKind, Location, PeerAddress, TestPayload
from m2flow.runtime.transport.readers import ReadersOf
from m2flow.runtime.transport.shared_memory import PoolFull, SharedHandle, SharedPool
from m2flow.runtime.transport.table import SHARED, Scope, way
from m2flow.runtime.transport.wire import Packed, pack


class PayloadServer:
    """Answers requests for payloads, each connection on a thread of its own.

    Args:
        provide: the value of a key; called on many threads at once. What it raises is raised again
            where the key was asked for. It may return a `Packed` too.
        pool: shared memory for answers on this node; without it they are streamed.
        key: what peers must know.
        host: the address to listen on for other nodes; None to be reached on this one only.
        node: the name of this machine, as in `Peers`.
        name: what people call this process.
        devices: what it has of its GPU.
    """

    def __init__(
        self,
        provide: Callable[[Any], Any],
        pool: SharedPool | None,
        key: bytes,
        host: str | None = LOOPBACK,
        *,
        node: str | None = None,
        name: str = "a peer",
        devices: CudaIPC | None = None,
    ) -> None:
        self._provide, self._pool = provide, pool
        self._readers = None if pool is None else ReadersOf(pool)
        self._devices = devices
        gpu = None if devices is None else devices.gpu
        self._location = Location(name, node or this_machine(), gpu)
        self._listener = Listener(key, host, self._serve)
        self.address = PeerAddress(self._location.node, self._listener.endpoint, gpu)

    def close(self) -> None:
        """Stop answering; peers see a PeerLost."""
        self._listener.hang_up()
        if self._readers is not None:
            self._readers.close()

    def _serve(self, connection: socket.socket) -> None:
        reader, said_farewell = "", False
        try:
            stream = FrameStream(connection)
            reader, location = pickle.loads(stream.receive().head)
            near = connection.family == socket.AF_UNIX
            if near and self._readers is not None:
                self._readers.reclaim_from_dead()
                self._readers.add(reader, connection)
            asker = _Asker(reader, location, "node" if near else "cluster")
            said_farewell = self._converse(stream, asker)
        except OSError:
            pass  # the asker has gone: what it held is reclaimed below
        finally:
            connection.close()
            if self._readers is not None:
                self._readers.reclaim_from_dead(wait_for=None if said_farewell else reader)

    def _converse(self, stream: FrameStream, asker: _Asker) -> bool:
        """Answer requests until the other side says farewell."""
        held = _Offered()
        while True:
            request = stream.receive()
            if request.kind == FrameKind.ABANDONED:
                self._take_back(held)
            if request.kind in (FrameKind.ABANDONED, FrameKind.DONE):
                return True
            answer, held = self._answer(request, asker)
            del request  # while waiting, nothing of it is held
            try:
                stream.send(answer)
            except OSError:
                self._take_back(held)  # it was not read
                raise
            del answer

    def _answer(self, request: Frame, asker: _Asker) -> tuple[Frame, _Offered]:
        try:
            key, refused = pickle.loads(request.head)
            value = self._test_payload(key) if isinstance(key, TestPayload) else self._provide(key)
            packed = value if isinstance(value, Packed) else pack(value)
            answer = None if refused else self._by_device(packed, asker)
            return answer or self._by_host(packed, asker)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who asked
            return _frame_of_error(error), _Offered()

    # --- host memory ------------------------------------------------------------------------------

    def _by_host(self, packed: Packed, asker: _Asker) -> tuple[Frame, _Offered]:
        if self._pool is not None and way(asker.scope, packed.nbytes) == SHARED:
            handle = self._share(self._pool, packed, asker.reader)
            if handle is not None:
                return Frame(FrameKind.SHARED, handle.to_bytes()), _Offered(handle)
        memory = [one.memory() for one in packed.buffers]
        return Frame(FrameKind.STREAM, packed.head, memory), _Offered()

    def _share(self, pool: SharedPool, packed: Packed, reader: str) -> SharedHandle | None:
        """Put a payload into shared memory; None if there is no room."""
        try:
            return pool.write(packed, reader)
        except PoolFull:
            if self._readers is not None and self._readers.reclaim_from_dead():
                return self._share(pool, packed, reader)
            return None

    # --- device memory ----------------------------------------------------------------------------

    def _by_device(self, packed: Packed, asker: _Asker) -> tuple[Frame, _Offered] | None:
        """An answer whose device part stays on the device; None if all is to go by host memory."""
        devices = self._devices
        if devices is None or scope_between(asker.location, self._location) is None:
            return None
        cargo = load(packed, devices.owns)
        if not cargo.pieces:
            return None
        try:
            handles = devices.offer(cargo.pieces, asker.location)
        except LinkRefused:
            return None
        offer = DeviceOffer(handles, cargo.places, self._location)
        memory = [cargo.host.head, *(buffer.memory() for buffer in cargo.host.buffers)]
        return Frame(FrameKind.DEVICE, pickle.dumps(offer, 5), memory), _Offered(on_device=handles)

    # --- what an answer holds ---------------------------------------------------------------------

    def _take_back(self, held: _Offered) -> None:
        """Reclaim the memory behind an answer that nobody has read."""
        if held.handle is not None and self._pool is not None:
            self._pool.release(held.handle)
        if self._devices is not None:
            self._devices.withdraw(held.on_device)

    def _test_payload(self, key: TestPayload) -> Any:
        if key.on_device and self._devices is not None:
            return [self._devices.test_piece(key.nbytes)]
        return _zeros(key.nbytes)


class DeviceOffer(NamedTuple):
    """Head of an answer whose device part goes by CUDA IPC; its buffers are the host part.

    Attributes:
        handles: of the pieces, which the asker opens.
        places: for each buffer of the payload, whether it is a piece.
        holder: who answers.
    """

    handles: tuple[Handle, ...]
    places: tuple[bool, ...]
    holder: Location


class _Asker(NamedTuple):
    """The process that asks on a connection: its name as a reader, its location, how near it is."""

    reader: str
    location: Location
    scope: Scope


class _Offered(NamedTuple):
    """Memory that the last answer holds for the asker until the asker has read it."""

    handle: SharedHandle | None = None
    on_device: tuple[Handle, ...] = ()


@cache
def _zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _frame_of_error(error: Exception) -> Frame:
    text = "".join(traceback.format_exception(error))
    error.add_note(f"on the peer that was asked:\n{text}")
    try:
        head = pack(error.with_traceback(None)).head
        pickle.loads(head)  # some exceptions cannot be made again from what they were pickled to
    except Exception:  # noqa: BLE001 - then its text has to do
        head = pack(RuntimeError(text)).head
    return Frame(FrameKind.ERROR, head)
