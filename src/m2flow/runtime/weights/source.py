"""`WeightsOut`: a lane's weights laid out for other lanes, each version as it was when exported.

A snapshot lies in shared memory, where lanes of this node read it, and is sent to all others. It is
asked for from the threads of the payload server while the lane goes on. The last version stays
until the next one is laid out, for lanes that are lost and come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from m2flow.runtime.transport.shared_memory import PoolFull, SharedPool
from m2flow.runtime.weights.exports import Export, WeightsKey
from m2flow.runtime.weights.manifest import TensorManifest, describe, local_tensor


class WeightsOut:
    """Lays out weights of the workers on a lane.

    Args:
        pool: memory for snapshots.
        lane: the lane.
    """

    def __init__(self, pool: SharedPool, lane: int) -> None:
        self._pool, self._lane = pool, lane
        self._versions: dict[tuple[str, int], tuple[TensorManifest, Tensor]] = {}

    def lay_out(self, source: str, version: int, weights: Mapping[str, Any], oldest: int) -> Export:
        """Keep a version as it is now, for those who ask; versions before the oldest may go.

        Raises:
            ManifestError: the weights cannot be described.
        """
        for one in [one for one in self._versions if one[0] == source and one[1] < oldest]:
            del self._versions[one]
        manifest = describe(weights)
        flat = self._memory(manifest.snapshot_bytes)
        with torch.no_grad():
            for name, place in manifest.views(flat).items():
                place.copy_(local_tensor(weights[name]))
        self._versions[source, version] = manifest, flat
        return Export(source, version, self._lane, manifest.num_bytes)

    def _memory(self, num_bytes: int) -> Tensor:
        try:
            return self._pool.empty((num_bytes,), torch.uint8)
        except PoolFull:
            return torch.empty(num_bytes, dtype=torch.uint8)

    def provide(self, key: WeightsKey) -> tuple[TensorManifest, Tensor]:
        """Return the manifest and the snapshot of a version; KeyError if this lane has none."""
        return self._versions[key.source, key.version]

    def drop(self) -> None:
        """Drop the versions that an earlier run laid out."""
        self._versions = {}
