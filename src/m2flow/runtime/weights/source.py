"""`WeightsOut`: a lane's weights laid out for other lanes, each version as it was when exported.

One snapshot serves readers in shared memory, by a message and by a broadcast. It is asked for from
the threads of the payload server while the lane goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from m2flow.runtime.transport.shared_memory import PoolFull, SharedPool
from m2flow.runtime.weights.broadcast import broadcast
from m2flow.runtime.weights.exports import Export, ManifestKey, Sends, WeightsKey
from m2flow.runtime.weights.manifest import TensorManifest
from m2flow.runtime.weights.snapshot import ManifestCache, Snapshot, on_gpu


@dataclass(slots=True)
class _Source:
    """What is kept for one worker that publishes."""

    cache: ManifestCache = field(default_factory=ManifestCache)
    manifests: dict[int, TensorManifest] = field(default_factory=dict)
    snapshots: dict[int, Tensor] = field(default_factory=dict)
    broadcast: threading.Thread | None = None
    failure: BaseException | None = None


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

    def lay_out(
        self, source: str, version: int, weights: Mapping[str, Any], sends: Sends, group: Any
    ) -> tuple[Export, ...]:
        """Keep a version as it is now, and say for each way of sending where it lies.

        Args:
            group: the process group of a broadcast, or None.

        Raises:
            ManifestError: the weights cannot be described.
            Exception: what a broadcast of an earlier version has failed with.
        """
        kept = self._sources.setdefault(source, _Source())
        if kept.failure is not None:
            raise kept.failure
        kept.snapshots = {
            number: flat for number, flat in kept.snapshots.items() if number >= sends.oldest
        }
        tensors = kept.cache.see(weights)
        snapshot, token = kept.cache.snapshot, kept.cache.token
        kept.manifests[token] = snapshot.manifest
        on_device = on_gpu(snapshot.manifest) and sends.readers.keys() == {"broadcast"}
        flat = self._taken(snapshot, tensors, on_device=on_device)
        exports = []
        for method, readers in sends.readers.items():
            size = snapshot.manifest.num_bytes
            export = Export(source, version, self._lane, method, token, size)
            if method == "broadcast":
                self._broadcast(kept, flat, group)
                export = replace(export, group=sends.group, rank=self._position)
                export = replace(export, on_gpu=flat.is_cuda)
            elif method == "shared":
                export = replace(export, handle=self._handle(flat, readers))
            if method != "broadcast" and export.handle is None:
                kept.snapshots[version] = flat
            exports.append(export)
        return tuple(exports)

    def _taken(
        self, snapshot: Snapshot, tensors: Mapping[str, Tensor], *, on_device: bool
    ) -> Tensor:
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
                    broadcast(flat, self._position, group)
            except BaseException as error:  # noqa: BLE001 - raised by the next export
                kept.failure = error

        kept.broadcast = threading.Thread(target=send, name="m2flow broadcast", daemon=True)
        kept.broadcast.start()

    def provide(self, key: WeightsKey | ManifestKey) -> Any:
        """What a reader asks for; KeyError if it is not here."""
        kept = self._sources[key.source]
        if isinstance(key, ManifestKey):
            return kept.manifests[key.manifest]
        return kept.snapshots[key.version]

    def drop(self) -> None:
        """Let everything go that an earlier run laid out."""
        self._sources = {}
