"""`WeightsOut`: a lane's weights laid out for other lanes, each version as it was when exported.

A snapshot lies in shared memory, where lanes of this node read it, and is sent to all others. It is
asked for from the threads of the payload server while the lane goes on. The last version stays
until the next one is laid out, for lanes that are lost and come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from m2flow.runtime.transport.shared_memory import PoolFull, SharedPool
from m2flow.runtime.weights.exports import Export, WeightsKey
from m2flow.runtime.weights.manifest import TensorManifest, describe, local_tensor
from m2flow.runtime.weights.snapshot import Snapshot


@dataclass(slots=True)
class _PublishedWeights:
    """What is kept for one worker that publishes.

    Attributes:
        snapshot: where the weights seen last, and their manifest, go in a snapshot.
        versions: manifest and snapshot of each.
    """

    snapshot: Snapshot = field(default_factory=lambda: Snapshot(TensorManifest({})))
    versions: dict[int, tuple[TensorManifest, Tensor]] = field(default_factory=dict)


class WeightsOut:
    """Lays out weights of the workers on a lane.

    Args:
        pool: memory for snapshots.
        lane: the lane.
    """

    def __init__(self, pool: SharedPool, lane: int) -> None:
        self._pool, self._lane = pool, lane
        self._sources: dict[str, _PublishedWeights] = {}

    def lay_out(self, source: str, version: int, weights: Mapping[str, Any], oldest: int) -> Export:
        """Keep a version as it is now, for those who ask; versions before the oldest may go.

        Raises:
            ManifestError: the weights cannot be described.
        """
        kept = self._sources.setdefault(source, _PublishedWeights())
        kept.versions = {n: there for n, there in kept.versions.items() if n >= oldest}
        manifest = describe(weights)
        if manifest != kept.snapshot.manifest:
            kept.snapshot = Snapshot(manifest)
        flat = self._memory(kept.snapshot.num_bytes)
        kept.snapshot.take(flat, {name: local_tensor(weights[name]) for name in manifest.held})
        kept.versions[version] = manifest, flat
        return Export(source, version, self._lane, manifest.num_bytes)

    def _memory(self, num_bytes: int) -> Tensor:
        try:
            return self._pool.empty((num_bytes,), torch.uint8)
        except PoolFull:
            return torch.empty(num_bytes, dtype=torch.uint8)

    def provide(self, key: WeightsKey) -> tuple[TensorManifest, Tensor]:
        """Return the manifest and the snapshot of a version; KeyError if this lane has none."""
        return self._sources[key.source].versions[key.version]

    def drop(self) -> None:
        """Drop the versions that an earlier run laid out."""
        self._sources = {}
