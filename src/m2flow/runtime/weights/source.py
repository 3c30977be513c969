"""`WeightsOut`: a lane's weights laid out for other lanes, each version as it was when exported.

A snapshot serves readers in shared memory, by a message and by a broadcast; a delta has a message
of its own, and whoever cannot use it asks for everything instead. Asked from the threads of the
payload server while the lane goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from m2flow.runtime.lane.orders import Export, Sends
from m2flow.runtime.transport.shared_memory import PoolFull, SharedPool
from m2flow.runtime.weights.buckets import broadcast_in_buckets
from m2flow.runtime.weights.delta import Delta, DeltaEncoder
from m2flow.runtime.weights.layout import Layout
from m2flow.runtime.weights.snapshot import (
    LayoutCache,
    Snapshot,
    changed_share,
    on_gpu,
)


@dataclass(frozen=True, slots=True)
class WeightsKey:
    """Asks a lane for a version of weights: a snapshot as one uint8 tensor, or a delta's payload.

    Attributes:
        what: "snapshot"; "delta"; or "bootstrap", the delta that builds on nothing.
    """

    source: str
    version: int
    what: str


@dataclass(frozen=True, slots=True)
class LayoutKey:
    """Asks a lane for the Layout behind the token of an export."""

    source: str
    token: int


@dataclass(slots=True)
class _Source:
    """What is kept for one worker that publishes."""

    cache: LayoutCache = field(default_factory=LayoutCache)
    layouts: dict[int, Layout] = field(default_factory=dict)
    encoder: DeltaEncoder = field(default_factory=DeltaEncoder)
    snapshots: dict[int, Tensor] = field(default_factory=dict)
    deltas: dict[int, dict[str, Any]] = field(default_factory=dict)
    bootstraps: dict[int, dict[str, Any]] = field(default_factory=dict)
    broadcast: threading.Thread | None = None
    failure: BaseException | None = None
    before: tuple[int, Tensor] | None = None  # token and snapshot of the last version


class WeightsOut:
    """Lays out weights of the workers on a lane.

    Args:
        pool: memory for snapshots.
        lane, position: the lane, and its place in the pool: its rank in a broadcast.
        by_handle: whether lanes of this node may read the pool's memory; else they ask.
    """

    def __init__(self, pool: SharedPool, lane: int, position: int, *, by_handle: bool) -> None:
        self._pool, self._lane, self._position = pool, lane, position
        self._by_handle = by_handle
        self._sources: dict[str, _Source] = {}
        self._lock = threading.Lock()  # over encoders, which change what they have sent

    def lay_out(
        self, source: str, version: int, weights: Mapping[str, Any], sends: Sends, group: Any
    ) -> tuple[Export, ...]:
        """Keep a version as it is now, and say for each way of sending where it lies.

        Args:
            group: the process group of a broadcast, or None.

        Raises:
            LayoutError: the weights cannot be described.
            Exception: what a broadcast of an earlier version has failed with.
        """
        kept = self._sources.setdefault(source, _Source())
        if kept.failure is not None:
            raise kept.failure
        for table in (kept.snapshots, kept.deltas, kept.bootstraps):
            for old in [number for number in table if number < sends.oldest]:
                del table[old]
        tensors = kept.cache.see(weights)
        snapshot, token = kept.cache.snapshot, kept.cache.token
        layout = snapshot.layout
        kept.layouts[token] = layout
        on_device = on_gpu(layout) and sends.readers.keys() <= {"broadcast", "delta"}
        flat, changed = None, None
        if sends.readers.keys() - {"delta"}:
            flat = self._snapshot(snapshot, tensors, on_device=on_device)
            changed = _changed(kept, flat, token, snapshot) if sends.measure else None
            kept.before = (token, flat) if sends.keep else None
        exports = []
        for method, readers in sends.readers.items():
            size = layout.num_bytes
            export = Export(source, version, self._lane, method, token, size, size, changed=changed)
            if method == "delta":
                delta = self._encode(kept, version, tensors)
                known = None if delta.base is None else delta.fraction_changed
                exports.append(replace(export, num_bytes=delta.num_bytes, changed=known))
                continue
            assert flat is not None
            if method == "broadcast":
                self._broadcast(kept, flat, group)
                export = replace(export, group=sends.group, rank=self._position)
                export = replace(export, on_gpu=flat.is_cuda)
            elif method == "shared":
                export = replace(export, handle=self._handle(flat, readers))
            if method == "copy" or (method == "shared" and export.handle is None):
                kept.snapshots[version] = flat
            exports.append(export)
        return tuple(exports)

    def _snapshot(
        self, snapshot: Snapshot, tensors: Mapping[str, Tensor], *, on_device: bool
    ) -> Tensor:
        """In the pool, whose memory is warm; elsewhere if it is full, or for a GPU's broadcast."""
        size = (snapshot.num_bytes,)
        try:
            if on_device:
                flat = torch.empty(size, dtype=torch.uint8, device="cuda")
            else:
                flat = self._pool.empty(size, torch.uint8)
        except PoolFull:
            flat = torch.empty(size, dtype=torch.uint8)
        snapshot.take(flat, tensors)
        return flat

    def _handle(self, flat: Tensor, readers: int) -> Any:
        """For readers of this node; None where they have to ask."""
        if not self._by_handle:
            return None
        try:
            return self._pool.write(flat, readers)
        except PoolFull:
            return None

    def _broadcast(self, kept: _Source, flat: Tensor, group: Any) -> None:
        """Send in the background, after the version before: the lane itself need not wait."""
        before = kept.broadcast

        def send() -> None:
            try:
                if before is not None:
                    before.join()
                if kept.failure is None:
                    broadcast_in_buckets([flat], self._position, group)
            except BaseException as error:  # noqa: BLE001 - raised by the next export
                kept.failure = error

        kept.broadcast = threading.Thread(target=send, name="m2flow broadcast", daemon=True)
        kept.broadcast.start()

    def _encode(self, kept: _Source, version: int, tensors: Mapping[str, Tensor]) -> Delta:
        with self._lock:
            encoder = kept.encoder
            last = encoder.version
            if last in kept.deltas and last not in kept.bootstraps:
                assert last is not None
                kept.bootstraps[last] = _own(encoder.bootstrap())  # somebody may still need it
            delta = encoder.encode(tensors, version)
            kept.deltas[version] = payload = _own(delta)
            if delta.base is None:
                kept.bootstraps[version] = payload
        return delta

    def provide(self, key: WeightsKey | LayoutKey) -> Any:
        """What a reader asks for; KeyError if it is not here."""
        kept = self._sources[key.source]
        if isinstance(key, LayoutKey):
            return kept.layouts[key.token]
        match key.what:
            case "snapshot":
                return kept.snapshots[key.version]
            case "delta":
                return kept.deltas[key.version]
        with self._lock:
            if key.version not in kept.bootstraps and key.version == kept.encoder.version:
                kept.bootstraps[key.version] = _own(kept.encoder.bootstrap())
            return kept.bootstraps[key.version]

    def drop(self) -> None:
        """Let everything go that an earlier run laid out."""
        self._sources = {}


def _own(delta: Delta) -> dict[str, Any]:
    """A delta's payload in memory of its own: the encoder goes on to change what it keeps."""
    payload = delta.to_payload()
    payload["changes"] = [
        (name, values.clone() if gaps is None else values, gaps, checksum)
        for name, values, gaps, checksum in payload["changes"]
    ]
    return payload


def _changed(kept: _Source, flat: Tensor, token: int, snapshot: Snapshot) -> float | None:
    """Share of elements that differ from the version before, if that is here and alike."""
    if kept.before is None or kept.before[0] != token:
        return None
    return changed_share(snapshot.views(kept.before[1]), snapshot.views(flat))
