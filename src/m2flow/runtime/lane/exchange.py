"""`Exchange`: a lane's dealings in payloads: what it holds for others, what it gets from them.

Items are asked for by the lane that reads them and travel straight from the lane that holds them,
by the way that fits. Published weights are laid out and taken over by the two halves of
`m2flow.runtime.weights`. The launcher has an exchange too, to read results; it serves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.runtime.lane.state_copy import StateCopy
from m2flow.runtime.lane.store import Store
from m2flow.runtime.transport.cuda_ipc import CudaIPC
from m2flow.runtime.transport.measure import measure
from m2flow.runtime.transport.peering import PeerAddress
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import PoolFull, SharedHandle, SharedPool
from m2flow.runtime.transport.table import LinkTable
from m2flow.runtime.transport.wire import pack, unpack
from m2flow.runtime.weights.exports import WeightsKey
from m2flow.runtime.weights.manifest import TensorManifest
from m2flow.runtime.weights.relay import Relay, RelayKey
from m2flow.runtime.weights.source import WeightsOut
from m2flow.runtime.weights.target import WeightsIn

FETCHES_AT_ONCE = 8
"""Threads that `fetch_later` uses at most."""

SHARED_BYTES = 64 << 10
"""Source items that are larger than this go through shared memory, where there is some."""


@dataclass(frozen=True, slots=True)
class ItemsKey:
    """Asks a lane for outputs of a stage."""

    flow: str
    step: int
    producer: int
    items: tuple[int, ...]


def name_of(lane: int | None) -> str:
    """What people, and shared memory, call a lane; None is the launcher."""
    return "the launcher" if lane is None else f"lane {lane}"


class Exchange:
    """Payloads in and out of one process.

    Args:
        lane: the lane's number; None for the launcher.
        position: its place among the lanes of the pool.
        node: Ray's id of the machine.
        host: its address for other machines; None if all lanes are on this one.
        folder: the pool's; its name begins those of the files in shared memory.
        key: the pool's secret.
        link: "stream" if nothing is to go through shared memory or by CUDA IPC; None for what fits.
        devices: what the process has of its GPU, if it runs on one: elements on a device then go
            by CUDA IPC where that is possible, and arrive there.
        beside: the exchanges of lanes in the same process, which this one joins: what lies there is
            taken by reference.

    Attributes:
        link: the one way that payloads take, or None.
        weights_out: lays weights out for other lanes; None in the launcher.
        weights_in: brings weights here.
    """

    def __init__(
        self,
        lane: int | None,
        position: int,
        node: str,
        host: str | None,
        folder: Path,
        key: bytes,
        link: str | None = None,
        devices: CudaIPC | None = None,
        beside: dict[int, Exchange] | None = None,
    ) -> None:
        name = name_of(lane)
        self.lane, self.position, self.link = lane, position, link
        if link not in (None, "stream"):
            raise UserError("no way for all payloads", key="link", value=link, expected='"stream"')
        ipc = devices if link is None else None
        self._store = Store()
        self._addresses: Mapping[int, PeerAddress] = {}
        self._pool = SharedPool(f"{folder.name}-{position}-")
        self._devices = devices
        self._fetching: ThreadPoolExecutor | None = None
        self._peers = Peers(node, key, name=name, devices=ipc)
        self._reader = self._peers.reader
        self._beside = {} if beside is None else beside
        # All of a process ask others on the first one's connections: with its own, each would need
        # one to every lane there, and every connection a thread at its other end.
        self._asks = next((one._peers for one in self._beside.values()), self._peers)
        self._relay = Relay(self._bring)
        self.weights_in = WeightsIn(lane, self._fetch, self._relay)
        self.weights_out: WeightsOut | None = None
        self._server: PayloadServer | None = None
        if lane is not None:  # nobody asks the launcher for anything
            if beside is not None:
                beside[lane] = self
            self.weights_out = WeightsOut(self._pool, lane)
            self._server = PayloadServer(
                self._provide,
                self._pool if link is None else None,
                key,
                host,
                node=node,
                name=name,
                devices=ipc,
            )

    @property
    def address(self) -> PeerAddress:
        """Where peers ask for what is on this lane."""
        assert self._server is not None, "the launcher serves nothing"
        return self._server.address

    def introduce(self, addresses: Mapping[int, PeerAddress]) -> None:
        """Tell where the lanes are, by number. What the last process of a lane has read is free."""
        for lane, address in addresses.items():
            if self._addresses.get(lane, address) != address:
                self.forget(lane)
        self._addresses = addresses
        self._peers.keep(addresses.values())

    def serve(self, store: Store) -> None:
        """Hand out items of this store from now on."""
        self._store = store

    def _provide(self, key: Any) -> Any:
        match key:
            case ItemsKey(flow, step, producer, items):
                return self._store.gather_alike(flow, step, [(producer, items)])
            case WeightsKey() if self.weights_out is not None:
                return self.weights_out.provide(key)
            case RelayKey():
                return self._relay.bring(key)
        raise KeyError(key)

    # --- items ------------------------------------------------------------------------------------

    def ask(self, lane: int, key: ItemsKey, seconds: float) -> Batch:
        """Items that a lane holds, which have the same columns."""
        return Batch.concat(self.ask_alike(lane, key, seconds))

    def ask_alike(self, lane: int, key: ItemsKey, seconds: float) -> Sequence[Batch]:
        """Items that a lane holds, as one Batch for each set of columns that they have."""
        batches: Sequence[Batch] = self._fetch(lane, key, seconds)
        return batches

    def fetch_later(
        self,
        lane: int,
        key: ItemsKey,
        seconds: float,
        *,
        then: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> Future[Batch]:
        """Items that a lane holds, fetched by another thread while this one goes on.

        That thread does `then` with them. The future raises what `ask` would have raised.
        """
        if self._fetching is None:
            self._fetching = ThreadPoolExecutor(FETCHES_AT_ONCE, "m2flow fetch")
        return self._fetching.submit(lambda: then(self.ask(lane, key, seconds)))

    def room(self, num_bytes: int) -> Any:
        """A uint8 tensor [num_bytes]: what lies in it goes to others on this machine uncopied."""
        if self.link is None:
            with suppress(PoolFull):
                return self._pool.empty((num_bytes,), torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_read(self, room: Any) -> bool:
        """Whether somebody on this machine still has what lay in a tensor of `room`."""
        return self._pool.is_read(room)

    def _fetch(self, lane: int, key: Any, seconds: float) -> Any:
        """What a lane has."""
        near = self if lane == self.lane else self._beside.get(lane)
        if near is not None:
            return near._provide(key)
        device = None if self._devices is None else self._devices.device
        return self._asks.fetch(self._addresses[lane], key, timeout=seconds, device=device)

    def _bring(self, lane: int, key: WeightsKey, seconds: float) -> tuple[TensorManifest, Tensor]:
        """A version of weights from another machine, laid where lanes of this one read it."""
        manifest, flat = self._fetch(lane, key, seconds)
        if self.link is None:
            with suppress(PoolFull):
                flat = self._pool.empty(flat.shape, flat.dtype).copy_(flat)
        return manifest, flat

    def shared(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A copy of a worker's state that `wrap` hands to all lanes of this machine as it lies."""
        return StateCopy.of(state, self.room).tensors

    def wrap(self, batch: Batch, lane: int, *, same_node: bool) -> Any:
        """Items to be sent along with an order to a lane."""
        packed = pack(batch)
        if same_node and self.link is None and packed.nbytes > SHARED_BYTES:
            try:
                return self._pool.write(packed, name_of(lane))
            except PoolFull:
                pass  # the line takes it, more slowly
        return packed.head, [bytes(buffer.memory()) for buffer in packed.buffers]

    def forget(self, lane: int) -> None:
        """Take back what was meant for a lane that is gone."""
        self._pool.forget(name_of(lane))

    def unwrap(self, wrapped: Any) -> Batch:
        """Items that have come along with an order."""
        batch: Batch
        if isinstance(wrapped, SharedHandle):
            batch = self._reader.read(wrapped)
        else:
            head, buffers = wrapped
            batch = unpack(head, [bytearray(buffer) for buffer in buffers])
        return batch

    def drop_weights(self) -> None:
        """Let everything go that an earlier run has published."""
        self.weights_in.drop()
        self._relay.drop()
        if self.weights_out is not None:
            self.weights_out.drop()

    # --- links ------------------------------------------------------------------------------------

    def measure(self, lanes: Iterable[int]) -> LinkTable:
        """Measure the ways from other lanes to here."""
        table = LinkTable()
        for lane in lanes:
            table = table.merged(measure(self._peers, self._addresses[lane]))
        return table

    def close(self) -> None:
        """Stop serving; shared memory goes when its last reader lets go."""
        if self._fetching is not None:
            self._fetching.shutdown(wait=False, cancel_futures=True)
        self._peers.close()
        if self._server is not None:
            self._server.close()
        self._pool.close()
