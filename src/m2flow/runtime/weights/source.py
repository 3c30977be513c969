"""`WeightsOut`: a lane's weights laid out for other lanes, each version as it was when exported.

One snapshot serves readers in shared memory and those who ask. It is asked for from the threads of
the payload server while the lane goes on. The last version stays until the next one is laid out,
for lanes that are lost and come back.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from m2flow.runtime.transport.shared_memory import PoolFull, SharedHandle, SharedPool
from m2flow.runtime.weights.exports import Export, ManifestKey, Sends, WeightsKey
from m2flow.runtime.weights.manifest import TensorManifest, describe, local_tensor
from m2flow.runtime.weights.snapshot import Snapshot


@dataclass(slots=True)
class _PublishedWeights:
    """What is kept for one worker that publishes.

    Attributes:
        snapshot: where the weights seen last, and their manifest, go in a snapshot.
        token: a hash of that manifest, by which lanes that have it know it again.
        manifests: by token.
        snapshots: by version.
    """

    snapshot: Snapshot = field(default_factory=lambda: Snapshot(TensorManifest({})))
    token: int = 0
    manifests: dict[int, TensorManifest] = field(default_factory=dict)
    snapshots: dict[int, Tensor] = field(default_factory=dict)

    def see(self, weights: Mapping[str, Any]) -> dict[str, Tensor]:
        """Name -> local tensor, tied ones once; raises ManifestError as `describe` does."""
        manifest = describe(weights)
        if manifest != self.snapshot.manifest:
            self.snapshot = Snapshot(manifest)
            digest = hashlib.blake2b(pickle.dumps(manifest), digest_size=8).digest()
            self.token = int.from_bytes(digest, "little")
            self.manifests[self.token] = manifest
        return {name: local_tensor(weights[name]) for name in manifest.held}


class WeightsOut:
    """Lays out weights of the workers on a lane.

    Args:
        pool: memory for snapshots.
        lane: the lane.
        by_handle: whether lanes of this node may read the pool's memory; else they ask.
    """

    def __init__(self, pool: SharedPool, lane: int, *, by_handle: bool) -> None:
        self._pool, self._lane, self._by_handle = pool, lane, by_handle
        self._sources: dict[str, _PublishedWeights] = {}

    def lay_out(
        self, source: str, version: int, weights: Mapping[str, Any], sends: Sends
    ) -> tuple[Export, ...]:
        """Keep a version as it is now, and say for each way of sending where it lies.

        Raises:
            ManifestError: the weights cannot be described.
        """
        kept = self._sources.setdefault(source, _PublishedWeights())
        kept.snapshots = {
            number: flat for number, flat in kept.snapshots.items() if number >= sends.oldest
        }
        tensors = kept.see(weights)
        flat = self._taken(kept.snapshot, tensors)
        size = kept.snapshot.manifest.num_bytes
        kept.snapshots[version] = flat
        exports = []
        for method, readers in sends.readers.items():
            handle = self._handle(flat, readers) if method == "shared" else None
            exports.append(Export(source, version, self._lane, method, kept.token, size, handle))
        return tuple(exports)

    def _taken(self, snapshot: Snapshot, tensors: Mapping[str, Tensor]) -> Tensor:
        size = (snapshot.num_bytes,)
        try:
            flat = self._pool.empty(size, torch.uint8)
        except PoolFull:
            flat = torch.empty(size, dtype=torch.uint8)
        snapshot.take(flat, tensors)
        return flat

    def _handle(self, flat: Tensor, readers: Sequence[int]) -> SharedHandle | None:
        """Put a snapshot into shared memory for readers of this node; None where they must ask."""
        if not self._by_handle:
            return None
        try:
            return self._pool.write(flat, readers)
        except PoolFull:
            return None

    def provide(self, key: WeightsKey | ManifestKey) -> Any:
        """Return the snapshot or manifest of a key; KeyError if this lane has none."""
        kept = self._sources[key.source]
        if isinstance(key, ManifestKey):
            return kept.manifests[key.manifest]
        return kept.snapshots[key.version]

    def drop(self) -> None:
        """Drop the versions that an earlier run laid out."""
        self._sources = {}
