"""Weights of a lane in one piece of memory: a snapshot that travels as a single tensor.

Where each tensor begins follows from the manifest, which both ends know. So nothing but bytes is
sent from version to version, and a snapshot costs one copy of each tensor and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from m2flow.runtime.transport.frame import aligned
from m2flow.runtime.weights.manifest import TensorManifest


class Snapshot:
    """Where the tensors of a manifest lie in one piece of memory.

    Attributes:
        manifest: what the lane holds.
        num_bytes: size of the memory.
    """

    def __init__(self, manifest: TensorManifest) -> None:
        self.manifest = manifest
        self._places: list[tuple[str, int, int, torch.dtype, tuple[int, ...]]] = []
        start = 0
        for name, held in manifest.held.items():
            end = start + held.num_bytes
            self._places.append((name, start, end, getattr(torch, held.dtype), held.box.shape))
            start += aligned(held.num_bytes)
        self.num_bytes = start

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> the tensor's place in the memory, of the shape that the lane holds.

        Args:
            flat: uint8, as long as `num_bytes` says, aligned to the largest element.
        """
        return {
            name: flat[start:end].view(dtype).view(shape)
            for name, start, end, dtype, shape in self._places
        }

    @torch.no_grad()
    def take(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, as they are now, to their places."""
        for name, place in self.views(flat).items():
            place.copy_(tensors[name])
