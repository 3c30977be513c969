"""Payloads pulled by whoever needs them from whoever has them, without the controller.

A `PayloadServer` answers on a unix socket and on TCP; `Peers` asks. The answering side picks the
link, because it knows the size: `shared` (a handle into its pool, on one node), `stream` (raw
buffers over the socket, in one piece with the message where they are small: `inline`), or another
that was handed in. A peer that is gone is a `PeerLost` at once and for good; nothing reconnects by
itself. Both sides prove that they know the key (multiprocessing's challenge) before they unpickle
anything.

One connection carries one request at a time, so that each needs no bookkeeping; threads that fetch
at once use one each. How a connection ends says what becomes of shared memory: see `_Farewell`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from m2flow.errors import M2FlowError
from m2flow.runtime.links.messages import JOINED_BYTES, Frame, Wire
from m2flow.runtime.links.readers import ReadersOf
from m2flow.runtime.links.shared_memory import PoolFull, SharedHandle, SharedPool, SharedReader
from m2flow.runtime.links.table import LinkTable, Scope
from m2flow.runtime.links.wire import Packed, pack, unpack

HANDSHAKE_SECONDS = 5.0
_LONGEST_UNIX_PATH = 100


class PeerLost(M2FlowError):
    """The process at the other end is gone, or cannot be reached."""


class LinkUnavailable(M2FlowError):
    """The link that was demanded does not exist between these two places."""


class TokenLink(Protocol):
    """A further link: what is sent stands for the value, and the receiver turns it back."""

    def put(self, value: Any) -> Any:
        """A small picklable token for the value; on the answering side."""

    def get(self, token: Any, timeout: float) -> Any:
        """The value behind a token, within so many seconds; on the asking side."""


class PeerAddress(NamedTuple):
    """Where a PayloadServer listens.

    Attributes:
        node: the name of its machine; the same name means the same /dev/shm.
        unix: path of its unix socket.
        tcp: its host and port.
    """

    node: str
    unix: str
    tcp: tuple[str, int]


@dataclass(frozen=True, slots=True)
class TestPayload:
    """A key that every server answers by itself, with a uint8 tensor of this size."""

    __test__ = False  # no test class, whatever pytest thinks of its name
    nbytes: int


class Received(NamedTuple):
    """A value, and how it came.

    Attributes:
        value: the payload.
        link: by which link.
        nbytes: its size as it was packed; 0 where it was not.
    """

    value: Any
    link: str
    nbytes: int


class _Farewell:
    """The last request on a connection, without an answer.

    DONE: what was received stays in use. ABANDONED: the answer under way was never read, so its
    handle is taken back. A connection that ends without a farewell probably belonged to a process
    that died: see `ReadersOf`.
    """

    DONE = "done"
    ABANDONED = "abandoned"


class PayloadServer:
    """Answers requests for payloads, each connection on a thread of its own.

    Args:
        provide: the value of a key; called on many threads at once. What it raises is raised again
            where the key was asked for. It may return a `Packed` too.
        pool: shared memory for answers on this node; without it they are streamed.
        authkey: what peers must know.
        host: the address to listen on for other nodes.
        node: the name of this machine, as in `Peers`.
        folder: where the unix socket goes; a temporary folder when left out.
        table: what links cost; may be replaced at any time through the attribute.
        links: further links by name.
    """

    def __init__(
        self,
        provide: Callable[[Any], Any],
        pool: SharedPool | None,
        authkey: bytes,
        host: str = "127.0.0.1",
        *,
        node: str | None = None,
        folder: str | Path | None = None,
        table: LinkTable | None = None,
        links: Mapping[str, TokenLink] | None = None,
    ) -> None:
        self.table = table or LinkTable.assumed()
        self._provide = provide
        self._pool = pool
        self._readers = None if pool is None else ReadersOf(pool)
        self._authkey = authkey
        self._links = dict(links or {})
        self._own_folder = tempfile.mkdtemp(prefix="m2flow-") if folder is None else None
        path = Path(folder or self._own_folder or "") / f"{secrets.token_hex(4)}.sock"
        if len(str(path)) > _LONGEST_UNIX_PATH:
            raise ValueError(f"the path of a unix socket is too long for the system: {path}")
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(str(path))
        tcp = socket.create_server((host, 0), backlog=128)
        unix.listen(128)
        self._listeners = [unix, tcp]
        self._open: set[socket.socket] = set()
        self._closed = False
        self.address = PeerAddress(node or this_node(), str(path), (host, tcp.getsockname()[1]))
        for listener in self._listeners:
            name = "m2flow payloads"
            threading.Thread(target=self._accept, args=(listener,), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop answering; peers see a PeerLost."""
        self._closed = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # not connected: what shutting a listener down says
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):  # gone already
                connection.shutdown(socket.SHUT_RDWR)
        if self._readers is not None:
            self._readers.close()
        Path(self.address.unix).unlink(missing_ok=True)
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                raise
            threading.Thread(
                target=self._serve, args=(connection,), name="m2flow payload", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        reader = ""
        said_farewell = False
        try:
            _authenticate(connection, self._authkey, HANDSHAKE_SECONDS, asking=False)
            wire = Wire(connection)
            reader = wire.receive().object()
            scope: Scope = "node" if connection.family == socket.AF_UNIX else "cluster"
            if scope == "node" and self._readers is not None:
                self._readers.bury()
                self._readers.add(reader, connection)
            said_farewell = self._converse(wire, scope, reader)
        except (OSError, EOFError, AuthenticationError):
            pass  # the other side knows; what it held is taken back below
        finally:
            self._open.discard(connection)
            connection.close()
            if self._readers is not None:
                self._readers.bury(wait_for=None if said_farewell else reader)

    def _converse(self, wire: Wire, scope: Scope, reader: str) -> bool:
        """Answer requests until the other side says farewell."""
        handle: SharedHandle | None = None
        while True:
            request = wire.receive()
            if (
                request.kind == _Farewell.ABANDONED
                and handle is not None
                and self._pool is not None
            ):
                self._pool.release(handle)
            if request.kind in (_Farewell.ABANDONED, _Farewell.DONE):
                return True
            answer, handle = self._answer(request, scope, reader)
            try:
                wire.send(answer)
            except OSError:
                if handle is not None and self._pool is not None:
                    self._pool.release(handle)  # it was not read
                raise
            del answer, request  # while waiting, nothing of it is held

    def _answer(
        self, request: Frame, scope: Scope, reader: str
    ) -> tuple[Frame, SharedHandle | None]:
        try:
            key, link = request.object()
            value = _test_payload(key) if isinstance(key, TestPayload) else self._provide(key)
            if link in self._links:
                return Frame.of_object(link, self._links[link].put(value)), None
            packed = value if isinstance(value, Packed) else pack(value)
            kind = link or self._choose(scope, packed.nbytes)
            if kind in self._links:
                return Frame.of_object(kind, self._links[kind].put(value)), None
            if kind == "shared":
                handle = self._share(packed, scope, reader, demanded=link is not None)
                if handle is not None:
                    return Frame("shared", handle.to_bytes()), handle
                kind = "stream"
            if kind not in ("inline", "stream"):
                raise LinkUnavailable(f"there is no link {kind!r} here")
            return Frame.of_packed("stream", packed), None
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who asked
            return _frame_of_error(error), None

    def _share(
        self, packed: Packed, scope: Scope, reader: str, *, demanded: bool
    ) -> SharedHandle | None:
        if self._pool is None or self._readers is None or scope != "node":
            raise LinkUnavailable("there is no link 'shared' between these two places")
        try:
            return self._pool.write(packed, [reader])
        except PoolFull:
            if self._readers.bury():
                return self._share(packed, scope, reader, demanded=demanded)
            if demanded:
                raise
            return None

    def _choose(self, scope: Scope, nbytes: int) -> str:
        ways = {"stream", *self._links}
        if scope == "node" and self._pool is not None:
            ways.add("shared")
        return self.table.choose(scope, nbytes, ways) or "stream"


class Peers:
    """Asks PayloadServers for payloads. Thread-safe.

    Args:
        node: the name of this machine; servers with the same name share its /dev/shm.
        authkey: what the servers ask for.
        table: measured costs; with a hint of the size, the asker's own choice goes first.
        links: further links by name, as the servers have them.
    """

    def __init__(
        self,
        node: str | None,
        authkey: bytes,
        table: LinkTable | None = None,
        *,
        links: Mapping[str, TokenLink] | None = None,
    ) -> None:
        self.node = node or this_node()
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
            best = self.table.choose("node" if near else "cluster", nbytes_hint)
            link = best if best in ways else None
        request = Frame.of_object("request", (key, link))
        wire = self._connection(address, timeout, near=near)
        try:
            wire.deadline = wire.clock() + timeout
            wire.send(request)
            frame = wire.receive()
        except TimeoutError:
            self._abandon(wire)
            raise TimeoutError(f"no answer about {key!r} from {address} in {timeout} s") from None
        except (OSError, EOFError) as error:
            wire.close()
            raise self._lose(address, error) from error
        except BaseException:  # an interrupt: the answer will come, and nobody read it
            self._abandon(wire)
            raise
        try:
            return self._received(frame, timeout, device)
        finally:
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

    def _received(
        self, frame: Frame, timeout: float, device: str | torch.device | None
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
        return Received(self._links[frame.kind].get(frame.object(), timeout), frame.kind, 0)

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
            _authenticate(connection, self._authkey, timeout, asking=True)
            wire = Wire(connection)
            wire.send(Frame.of_object("hello", self.name))
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
            wire.send(Frame(_Farewell.ABANDONED, b""))
        wire.close()


def this_node() -> str:
    """A name that this machine's processes agree on and no other machine has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()}/{name}"


def _say_farewell(idle: dict[PeerAddress, list[Wire]]) -> None:
    for wires in idle.values():
        for wire in wires:
            with contextlib.suppress(OSError):  # the peer went first
                wire.deadline = wire.clock() + 1.0
                wire.send(Frame(_Farewell.DONE, b""))
            wire.close()
    idle.clear()


def _authenticate(
    connection: socket.socket, authkey: bytes, seconds: float, *, asking: bool
) -> None:
    """Prove to each other that both know the key; the asking side answers first.

    A stranger that says nothing is given up after so many seconds: TimeoutError.
    """
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    channel = Connection(os.dup(connection.fileno()))
    try:
        if asking:
            answer_challenge(channel, authkey)
            deliver_challenge(channel, authkey)
        else:
            deliver_challenge(channel, authkey)
            answer_challenge(channel, authkey)
    except BlockingIOError as error:
        raise TimeoutError("the handshake took too long") from error
    finally:
        channel.close()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _frame_of_error(error: Exception) -> Frame:
    text = "".join(traceback.format_exception(error))
    error.add_note(f"on the peer that was asked:\n{text}")
    try:
        frame = Frame.of_object("error", error.with_traceback(None))
        frame.object()  # some exceptions cannot be made again from what they were pickled to
        return frame
    except Exception:  # noqa: BLE001 - then its text has to do
        return Frame.of_object("error", RuntimeError(text))


_test_payloads: dict[int, torch.Tensor] = {}


def _test_payload(key: TestPayload) -> torch.Tensor:
    if key.nbytes not in _test_payloads:
        _test_payloads[key.nbytes] = torch.zeros(key.nbytes, dtype=torch.uint8)
    return _test_payloads[key.nbytes]
