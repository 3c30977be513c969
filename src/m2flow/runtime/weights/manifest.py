"""Manifests: `describe` reads off a worker's weights which part of which tensor a lane holds.

Values may be plain tensors (the lane holds all of it), DTensors on any mesh, or `Shard`s. A
manifest holds no tensor and can be sent anywhere. Two names of one tensor (tied embeddings) are one
entry and an alias, so that the values travel once and arrive tied. A *snapshot* has all that a lane
holds in one piece of memory; where each tensor lies in it follows from the manifest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import UserError, suggestion
from m2flow.runtime.transport.frame import aligned
from m2flow.runtime.weights.boxes import Box


class ManifestError(UserError):
    """Weights that cannot be described, or cannot be sent as the target wants them."""


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that a lane holds, for workers that cut tensors up themselves.

    Attributes:
        tensor: the values; its shape is the box's.
        box: which part of the whole tensor they are.
        global_shape: shape of the whole tensor.
    """

    tensor: Tensor
    box: Box
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What a lane has of one tensor.

    Attributes:
        global_shape: shape of the whole tensor.
        dtype: torch's name of the element type, such as "bfloat16".
        itemsize: bytes of an element.
        box: the part held here; it may be empty.
    """

    global_shape: tuple[int, ...]
    dtype: str
    itemsize: int
    box: Box

    @property
    def num_bytes(self) -> int:
        """Bytes of the part held here."""
        return self.box.numel * self.itemsize


@dataclass(frozen=True)
class TensorManifest:
    """What a lane holds, by name.

    Attributes:
        held: one entry for each tensor.
        tied: further names of these tensors -> the name in `held`.
    """

    held: Mapping[str, TensorPart]
    tied: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> TensorPart | None:
        """The entry of a tensor under any of its names."""
        return self.held.get(self.tied.get(name, name))

    @property
    def num_bytes(self) -> int:
        """Bytes held here, tied tensors counted once."""
        return sum(held.num_bytes for held in self.held.values())

    @property
    def snapshot_bytes(self) -> int:
        """Size of a snapshot, in which each tensor is aligned."""
        return sum(aligned(held.num_bytes) for held in self.held.values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> the tensor's place in a snapshot, of the shape that the lane holds.

        Args:
            flat: uint8, of `snapshot_bytes`, aligned to the largest element.
        """
        views, start = {}, 0
        for name, held in self.held.items():
            part = flat[start : start + held.num_bytes]
            views[name] = part.view(getattr(torch, held.dtype)).view(held.box.shape)
            start += aligned(held.num_bytes)
        return views


def describe(weights: Mapping[str, Any]) -> TensorManifest:
    """What a lane holds of the tensors that its worker's `weights()` names.

    Args:
        weights: name -> Tensor, DTensor or Shard.

    Raises:
        ManifestError: a value is none of these, its shape is not its box's, or it is a DTensor
            whose local values are partial sums or rows that do not lie side by side.
    """
    held: dict[str, TensorPart] = {}
    tied: dict[str, str] = {}
    names: dict[object, str] = {}
    for name, value in weights.items():
        entry = _held(name, value)
        first = names.setdefault(_identity(name, local_tensor(value), entry), name)
        if first == name:
            held[name] = entry
        else:
            tied[name] = first
    return TensorManifest(held, tied)


def local_tensor(value: Any) -> Tensor:
    """The values that this lane holds, detached: no copy and no communication."""
    if isinstance(value, Shard):
        value = value.tensor
    if is_dtensor(value):
        value = value._local_tensor
    tensor: Tensor = value.detach()
    return tensor


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor. Does not import their module, which takes a second and 40 MB.

    Without it there can be none.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def merged(manifests: Mapping[int, TensorManifest]) -> TensorManifest:
    """What the lanes have between them: each entry's box is the whole tensor.

    Args:
        manifests: lane -> what it holds.

    Raises:
        ManifestError: lanes disagree about a tensor's shape or dtype.
    """
    held: dict[str, TensorPart] = {}
    tied: dict[str, str] = {}
    said_by: dict[str, int] = {}
    for lane, manifest in manifests.items():
        for name, here in manifest.held.items():
            there = held.get(name)
            if there is None:
                held[name] = TensorPart(
                    here.global_shape, here.dtype, here.itemsize, Box.whole(here.global_shape)
                )
                said_by[name] = lane
                continue
            for what in ("global_shape", "dtype"):
                a, b = getattr(there, what), getattr(here, what)
                if a != b:
                    raise ManifestError(
                        f"lane {said_by[name]} says {what} {a}, lane {lane} says {b}", key=name
                    )
        tied.update(manifest.tied)
    # A lane that holds nothing of a tied tensor cannot see that it is tied.
    return TensorManifest({n: h for n, h in held.items() if n not in tied}, tied)


def wanted_boxes(manifest: TensorManifest, boxes: Mapping[str, Box] | None) -> dict[str, Box]:
    """What a target asks for, checked: name in `manifest.held` -> box.

    Args:
        manifest: of all lanes of the source together, from `merged`.
        boxes: what the target's `weight_boxes` said: exactly what it wants to get, under any of a
            tensor's names. None for everything, whole.

    Raises:
        ManifestError: a name that the source does not have, a box that does not fit its tensor, or
            two boxes for one tied tensor.
    """
    if boxes is None:
        return {name: held.box for name, held in manifest.held.items()}
    wanted: dict[str, Box] = {}
    for name, box in boxes.items():
        held = manifest.get(name)
        if held is None:
            hint = suggestion(name, [*manifest.held, *manifest.tied])
            raise ManifestError("the source has no weights of this name", key=name, hint=hint)
        if not box.fits(held.global_shape):
            raise ManifestError(
                f"the box asked for does not fit the tensor's shape {held.global_shape}",
                key=name,
                value=box,
            )
        first = manifest.tied.get(name, name)
        if wanted.setdefault(first, box) != box:
            raise ManifestError(f"is tied to {first!r}, of which another box is wanted", key=name)
    return wanted


def check_weights(worker: str, weights: object) -> None:
    """Refuse what could not be sent to another lane, wherever it is to be installed.

    Args:
        worker: who publishes.
        weights: what its `weights` has returned.

    Raises:
        ManifestError: it is no mapping of names to tensors.
    """
    key = f"{worker}.weights"
    if not isinstance(weights, Mapping):
        raise ManifestError(
            "is no mapping of names to tensors", key=key, value=type(weights).__name__
        )
    for name, value in weights.items():
        if not isinstance(value, Tensor | Shard):
            raise ManifestError(
                f"gives {name!r}, which is no tensor",
                key=key,
                value=type(value).__name__,
                expected="a torch tensor, or a m2flow.runtime.weights.Shard of one",
            )


def _held(name: str, value: Any) -> TensorPart:
    tensor: Any = value
    if isinstance(value, Shard):
        tensor, box = value.tensor, value.box
        shape = tuple(value.global_shape)
        if tuple(tensor.shape) != box.shape or not box.fits(shape):
            raise ManifestError(
                f"shard of shape {tuple(tensor.shape)} is not {box} of a tensor {shape}", key=name
            )
    elif is_dtensor(value):
        shape, box = tuple(value.shape), _box_of(name, value)
    elif isinstance(value, Tensor):
        shape, box = tuple(value.shape), Box.whole(value.shape)
    else:
        raise ManifestError(
            "weights must be tensors", key=name, value=type(value), expected="Tensor or Shard"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorPart(shape, dtype, tensor.element_size(), box)


def _box_of(name: str, value: Any) -> Box:
    """The part of a DTensor that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, local = tuple(value.shape), tuple(value._local_tensor.shape)
    mesh, placements = value.device_mesh, value.placements
    if any(placement.is_partial() for placement in placements):
        raise ManifestError(
            "holds partial sums", key=name, hint="redistribute it before it is published"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a rank outside the mesh holds nothing
        return Box((0,) * len(shape), (0,) * len(shape))
    expected, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    if tuple(expected) != local or not _consecutive(shape, mesh.shape, coordinate, placements):
        raise ManifestError(
            f"this rank's part {local} of {shape} is not one block under {placements}", key=name
        )
    return Box(tuple(int(x) for x in offsets), local)


def _consecutive(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> bool:
    """Whether the rows that strided sharding leaves here lie side by side.

    They do where FSDP2 shards what tensor parallelism has sharded; they need not elsewhere.
    """
    strided = {p.dim for p in placements if hasattr(p, "split_factor")}
    for dim in strided:
        rows = torch.arange(shape[dim])
        for size, here, placement in zip(mesh, coordinate, placements, strict=True):
            if getattr(placement, "dim", None) != dim:
                continue
            parts = rows.chunk(getattr(placement, "split_factor", 1))
            mine = [part.chunk(size)[here] for part in parts if here < len(part.chunk(size))]
            rows = torch.cat([rows[:0], *mine])
        if len(rows) > 1 and int(rows[-1] - rows[0]) != len(rows) - 1:
            return False
    return True


def _identity(name: str, tensor: Tensor, entry: TensorPart) -> object:
    """Equal for two names where they are one tensor.

    A tensor without elements has no address that could be told from another's.
    """
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return name
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.stride(),
        entry.box,
        entry.global_shape,
    )
