"""Weights of a lane in one piece of memory: a snapshot that travels as a single tensor.

Where each tensor begins follows from the manifest, which both ends know. So nothing but bytes is
sent from version to version, and a snapshot costs one copy of each tensor and nothing else.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from m2flow.runtime.weights.manifest import (
    Shard,
    TensorManifest,
    describe,
    is_dtensor,
    local_tensor,
)

ALIGNMENT = 64
"""Bytes to which each tensor is aligned."""


class ManifestCache:
    """Describes a worker's weights anew only where something about them but their values differs.

    Attributes:
        snapshot: where the weights seen last, and their manifest, go in a snapshot.
        token: a hash of it, by which lanes that have it know it again.
    """

    def __init__(self) -> None:
        self.snapshot = Snapshot(TensorManifest({}))
        self.token = 0
        self._mark: Any = None

    def see(self, weights: Mapping[str, Any]) -> dict[str, Tensor]:
        """Name -> local tensor, tied ones once; raises ManifestError as `describe` does."""
        local = {name: local_tensor(value) for name, value in weights.items() if _is_known(value)}
        mark = _mark(weights, local)
        if mark != self._mark:
            manifest = describe(weights)
            self.snapshot = Snapshot(manifest)
            digest = hashlib.blake2b(pickle.dumps(manifest), digest_size=8).digest()
            self.token, self._mark = int.from_bytes(digest, "little"), mark
        return {name: local[name] for name in self.snapshot.manifest.held}


def _is_known(value: Any) -> bool:
    return isinstance(value, Tensor | Shard)


def _mark(weights: Mapping[str, Any], local: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Equal for weights that `describe` describes alike.

    Memory counts only in so far as two names share it: a worker may hand out new tensors each time.
    """
    first: dict[int, int] = {}
    marks = []
    for number, (name, value) in enumerate(weights.items()):
        tensor = local.get(name)
        if tensor is None:
            return (name, type(value), object())  # `describe` will refuse it
        extra: Any = None
        if is_dtensor(value):
            extra = tuple(value.shape), value.placements, id(value.device_mesh)
        elif isinstance(value, Shard):
            extra = value.box, value.global_shape
        shares = first.setdefault(tensor.data_ptr(), number)
        shape, strides = tensor.shape, tensor.stride()
        marks.append((name, shape, strides, tensor.dtype, tensor.device, shares, extra))
    return tuple(marks)


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
            start += -(-held.num_bytes // ALIGNMENT) * ALIGNMENT
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


def on_gpu(manifest: TensorManifest) -> bool:
    """Whether all of it lies on an accelerator; then that is where it is broadcast."""
    devices = {held.device for held in manifest.held.values()}
    return bool(devices) and all(device.startswith("cuda") for device in devices)
