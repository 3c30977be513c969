"""`PayloadServer`: hands payloads out to whoever asks, by the link that is fastest.

The answering side picks the link, because it knows the size and where the elements lie: `shared` (a
handle into its pool, on one node), `stream` (raw buffers over the socket, in one piece with the
message where they are small: `inline`), or another that was handed in. Elements on a GPU go by a
link between devices to an asker that stands on one, in the same message as the rest. Each side
proves that it knows the key before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import shutil
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from m2flow.errors import M2FlowError
from m2flow.runtime.transport.buffers import Memory
from m2flow.runtime.transport.cargo import Manifest, device_bytes, load
from m2flow.runtime.transport.devices import (
    ALL,
    STAGED,
    Devices,
    LinkRefused,
    Standing,
    choose_way,
)
from m2flow.runtime.transport.messages import Frame, Wire
from m2flow.runtime.transport.peering import (
    HANDSHAKE_SECONDS,
    About,
    Farewell,
    LinkUnavailable,
    PeerAddress,
    TestPayload,
    TokenLink,
    authenticate,
    this_node,
)
from m2flow.runtime.transport.readers import ReadersOf
from m2flow.runtime.transport.shared_memory import PoolFull, SharedHandle, SharedPool
from m2flow.runtime.transport.table import LinkTable, Scope
from m2flow.runtime.transport.wire import Packed, pack

_LONGEST_UNIX_PATH = 100
_log = logging.getLogger(__name__)


class PayloadServer:
    """Answers requests for payloads, each connection on a thread of its own.

    Args:
        provide: the value of a key; called on many threads at once. What it raises is raised again
            where the key was asked for. It may return a `Packed` too.
        pool: shared memory for answers on this node; without it they are streamed.
        authkey: what peers must know.
        host: the address to listen on for other nodes.
        node: the name of this machine, as in `Peers`.
        name: what people call this process.
        folder: where the unix socket goes; a temporary folder when left out.
        table: what links cost; may be replaced at any time through the attribute.
        links: further links by name.
        devices: what it has of its GPU.
    """

    def __init__(
        self,
        provide: Callable[[Any], Any],
        pool: SharedPool | None,
        authkey: bytes,
        host: str = "127.0.0.1",
        *,
        node: str | None = None,
        name: str = "a peer",
        folder: str | Path | None = None,
        table: LinkTable | None = None,
        links: Mapping[str, TokenLink] | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.table = table or LinkTable.assumed()
        self._provide = provide
        self._pool = pool
        self._readers = None if pool is None else ReadersOf(pool)
        self._authkey = authkey
        self._links = dict(links or {})
        self._devices = devices
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
        gpu = None if devices is None else devices.gpu
        self._standing = Standing(name, node or this_node(), gpu)
        port = tcp.getsockname()[1]
        self.address = PeerAddress(self._standing.node, str(path), (host, port), gpu)
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="m2flow payloads", daemon=True
            ).start()

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
            authenticate(connection, self._authkey, HANDSHAKE_SECONDS, asking=False)
            wire = Wire(connection)
            reader, standing = wire.receive().object()
            scope: Scope = "node" if connection.family == socket.AF_UNIX else "cluster"
            if scope == "node" and self._readers is not None:
                self._readers.bury()
                self._readers.add(reader, connection)
            said_farewell = self._converse(wire, _Asker(reader, standing, scope))
        except (OSError, EOFError, AuthenticationError):
            pass  # the other side knows; what it held is taken back below
        finally:
            self._open.discard(connection)
            connection.close()
            if self._readers is not None:
                self._readers.bury(wait_for=None if said_farewell else reader)

    def _converse(self, wire: Wire, asker: _Asker) -> bool:
        """Answer requests until the other side says farewell."""
        held = _Held()
        try:
            while True:
                request = wire.receive()
                if request.kind in (Farewell.ABANDONED, Farewell.DONE):
                    if request.kind == Farewell.ABANDONED:
                        self._take_back(held)
                    return True
                if request.kind == About.REFUSED:
                    self._withdraw(held, request.object())
                elif request.kind == About.PROCEED:
                    self._proceed(wire, held, request)
                else:
                    self._withdraw(held, ALL)
                    answer, held = self._answer(request, asker)
                    try:
                        wire.send(answer)
                    except OSError:
                        self._take_back(held)  # it was not read
                        raise
                    del answer
                del request  # while waiting, nothing of it is held
        finally:
            self._withdraw(held, ALL)

    def _answer(self, request: Frame, asker: _Asker) -> tuple[Frame, _Held]:
        try:
            key, link, without = request.object()
            value = self._test_payload(key) if isinstance(key, TestPayload) else self._provide(key)
            if link in self._links:
                return Frame.of_object(link, self._links[link].put(value)), _Held()
            packed = value if isinstance(value, Packed) else pack(value)
            if self._devices is not None:
                answer = self._by_device(self._devices, packed, asker, link, without)
                if answer is not None:
                    return answer
                if link in self._devices.links:  # a demand that concerns devices alone
                    link = None
            return self._by_host(value, packed, asker, None if link == STAGED else link)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who asked
            return _frame_of_error(error), _Held()

    # --- host memory ------------------------------------------------------------------------------

    def _by_host(
        self, value: Any, packed: Packed, asker: _Asker, link: str | None
    ) -> tuple[Frame, _Held]:
        kind = link or self._choose(asker.scope, packed.nbytes, among=self._links)
        if kind in self._links:
            return Frame.of_object(kind, self._links[kind].put(value)), _Held()
        if kind == "shared":
            handle = self._share(packed, asker, demanded=link is not None)
            if handle is not None:
                return Frame("shared", handle.to_bytes()), _Held(handle)
            kind = "stream"
        if kind not in ("inline", "stream"):
            raise LinkUnavailable(f"there is no link {kind!r} here")
        return Frame.of_packed("stream", packed), _Held()

    def _share(self, packed: Packed, asker: _Asker, *, demanded: bool) -> SharedHandle | None:
        if self._pool is None or self._readers is None or asker.scope != "node":
            raise LinkUnavailable("there is no link 'shared' between these two places")
        try:
            return self._pool.write(packed, [asker.reader])
        except PoolFull:
            if self._readers.bury():
                return self._share(packed, asker, demanded=demanded)
            if demanded:
                raise
            return None

    def _choose(self, scope: Scope, nbytes: int, *, among: Collection[str] = ()) -> str:
        ways = {"stream", *among}
        if scope == "node" and self._pool is not None:
            ways.add("shared")
        return self.table.choose(scope, nbytes, ways) or "stream"

    # --- device memory ----------------------------------------------------------------------------

    def _by_device(
        self,
        devices: Devices,
        packed: Packed,
        asker: _Asker,
        link: str | None,
        without: Mapping[str, str],
    ) -> tuple[Frame, _Held] | None:
        """An answer whose device part stays on the device; None if all is to go by host memory."""
        nbytes = device_bytes(packed, devices.on_device)
        if not nbytes:
            return None
        self._note(asker.standing, without)
        kind = choose_way(
            self.table,
            asker.standing,
            self._standing,
            nbytes,
            devices.links,
            without=without,
            demanded=link,
        )
        if kind is None:
            return None
        cargo = load(packed, devices.on_device)
        try:
            token = devices.links[kind].offer(cargo.pieces, asker.standing)
        except LinkRefused as error:
            self._note(asker.standing, {kind: str(error)})
            if link == kind:
                raise LinkUnavailable(f"there is no link {kind!r} here: {error}") from error
            return None
        handle = None
        try:
            if self._choose(asker.scope, cargo.host.nbytes) == "shared":
                handle = self._share(cargo.host, asker, demanded=False)
            memory: list[Memory] = []
            if handle is None:
                head = np.frombuffer(cargo.host.head, np.uint8)
                memory = [head, *(buffer.memory() for buffer in cargo.host.buffers)]
        except BaseException:
            devices.links[kind].withdraw(token, 0)
            raise
        shared = None if handle is None else handle.to_bytes()
        offer = Offer(kind, token, cargo.manifest, shared, self._standing)
        return Frame("device", pickle.dumps(offer, 5), memory), _Held(handle, kind, token)

    def _note(self, asker: Standing, refused: Mapping[str, str]) -> None:
        """Keep in the table what does not work between the two."""
        for kind, why in refused.items():
            line = f"no {kind} from {self._standing.name} to {asker.name}: {why}"
            self.table = self.table.refusing(line)

    def _proceed(self, wire: Wire, held: _Held, request: Frame) -> None:
        """Let the link of the last answer reply to its other end, and do what comes after."""
        finish = None
        try:
            assert self._devices is not None, "this process offers nothing of a device"
            assert held.kind is not None, "the last answer offers nothing"
            reply, finish = self._devices.links[held.kind].proceed(held.token, request.object())
            answer = Frame.of_object(About.REPLY, reply)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who asked
            answer = _frame_of_error(error)
        # Once a reply is made, the link has to see its part through, whoever hears of it.
        try:
            wire.send(answer)
        finally:
            if finish is not None:
                try:
                    finish(lambda: _check_taker(wire))
                except M2FlowError as error:
                    _log.warning("%s", error)
                    wire.send(Frame.of_object(About.FAILED, str(error)))

    def _withdraw(self, held: _Held, taken: int) -> None:
        if self._devices is not None and held.kind is not None:
            self._devices.links[held.kind].withdraw(held.token, taken)
            held.kind = None

    def _take_back(self, held: _Held) -> None:
        """Nobody has read the answer."""
        if held.handle is not None and self._pool is not None:
            self._pool.release(held.handle)
        self._withdraw(held, 0)

    def _test_payload(self, key: TestPayload) -> Any:
        if key.on_device:
            if self._devices is None:
                raise LinkUnavailable(f"{self._standing.name} stands on no GPU")
            return [self._devices.test_piece(key.nbytes)]
        if key.nbytes not in _test_payloads:
            _test_payloads[key.nbytes] = torch.zeros(key.nbytes, dtype=torch.uint8)
        return _test_payloads[key.nbytes]


class Offer(NamedTuple):
    """Head of an answer whose device part has a link of its own.

    Attributes:
        kind: which link.
        token: what the link says to its other end.
        manifest: where the buffers are.
        shared: the handle of the host part; None if the message itself has it: the packed head,
            then the buffers.
        holder: who answers.
    """

    kind: str
    token: Any
    manifest: Manifest
    shared: bytes | None
    holder: Standing


class _Asker(NamedTuple):
    """Who asks on a connection: the name in shared memory, the place, and how near it is."""

    reader: str
    standing: Standing
    scope: Scope


@dataclass(slots=True)
class _Held:
    """What the last answer holds for the asker until it has read it."""

    handle: SharedHandle | None = None
    kind: str | None = None
    token: Any = None


_test_payloads: dict[int, torch.Tensor] = {}


def _check_taker(wire: Wire) -> None:
    """Raise if who takes part in a transfer is gone, or has given it up."""
    match wire.comes_next():
        case "":
            raise EOFError("the connection has ended")
        case About.REFUSED | Farewell.ABANDONED:
            raise LinkRefused("the other side has given up")


def _frame_of_error(error: Exception) -> Frame:
    text = "".join(traceback.format_exception(error))
    error.add_note(f"on the peer that was asked:\n{text}")
    try:
        frame = Frame.of_object("error", error.with_traceback(None))
        frame.object()  # some exceptions cannot be made again from what they were pickled to
        return frame
    except Exception:  # noqa: BLE001 - then its text has to do
        return Frame.of_object("error", RuntimeError(text))
