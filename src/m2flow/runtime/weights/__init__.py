"""How weights are published between any two layouts of a source and a target.

The whole way is in docs/explanation/weights.md.
"""

from __future__ import annotations

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import ManifestError, Shard, TensorManifest, TensorPart

__all__ = ["Box", "ManifestError", "Shard", "TensorManifest", "TensorPart"]
