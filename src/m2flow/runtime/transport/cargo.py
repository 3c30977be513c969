"""The device part of a payload: which buffers stay on the device, and in how many pieces they go.

A link between GPUs pays for each tensor that it hands over, so small ones go together in one piece;
a large one is a piece of its own, where it lies. The host part goes by the ways of host memory, in
the same message. Knows no CUDA: what a device is, it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from m2flow.runtime.transport.buffers import Buffer
from m2flow.runtime.transport.wire import Packed

OWN_PIECE_BYTES = 1 << 20
"""Tensors smaller than this share a piece: a copy on the device costs less than a handle."""

ALIGNMENT = 256
"""Bytes at whose multiples tensors begin in a piece."""

OnDevice: TypeAlias = Callable[[Tensor], bool]
"""Whether a tensor's elements lie in the memory that the device's links can hand over."""


class CargoManifest(NamedTuple):
    """Where each buffer of a payload is to be found again.

    Attributes:
        places: for each of `Packed.buffers`, in order: None in host memory, or its piece, the first
            byte in it and the number of bytes.
        sizes: bytes of each piece.
    """

    places: tuple[tuple[int, int, int] | None, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self.sizes)

    def together(self, host: Iterable[Any], pieces: Sequence[Tensor]) -> list[Any]:
        """The buffers in order, for `unpack`: host memory, and flat uint8 views of the pieces."""
        rest = iter(host)
        return [
            next(rest) if place is None else pieces[place[0]][place[1] : place[1] + place[2]]
            for place in self.places
        ]


class Cargo(NamedTuple):
    """A payload, split into its host and device parts.

    Attributes:
        host: head and buffers in host memory, as a payload of their own.
        pieces: flat uint8 tensors on the device.
        manifest: what is where.
    """

    host: Packed
    pieces: list[Tensor]
    manifest: CargoManifest


def device_bytes(packed: Packed, on_device: OnDevice) -> int:
    """Bytes of a payload that lie on the device."""
    return sum(buffer.nbytes for buffer in packed.buffers if _is_there(buffer, on_device))


def load(packed: Packed, on_device: OnDevice) -> Cargo:
    """Split a payload into host and device buffers, in the order of the current stream."""
    host: list[Buffer] = []
    places: list[tuple[int, int, int] | None] = []
    large: list[Tensor] = []
    small: list[tuple[int, Tensor]] = []
    joined = 0
    for buffer in packed.buffers:
        if not _is_there(buffer, on_device):
            host.append(buffer)
            places.append(None)
        elif buffer.nbytes >= OWN_PIECE_BYTES:
            large.append(_flat(buffer.source))
            places.append((len(large), 0, buffer.nbytes))
        else:
            small.append((joined, _flat(buffer.source)))
            places.append((0, joined, buffer.nbytes))
            joined += buffer.nbytes + -buffer.nbytes % ALIGNMENT
    pieces = large
    if len(small) == 1:
        pieces = [small[0][1], *large]
    elif small:
        piece = torch.empty(joined, dtype=torch.uint8, device=small[0][1].device)
        for start, flat in small:
            piece[start : start + flat.numel()].copy_(flat)
        pieces = [piece, *large]
    else:  # the piece of small ones is number 0, and there is none
        places = [None if one is None else (one[0] - 1, *one[1:]) for one in places]
    rest = Packed(packed.head, host, len(packed.head) + sum(one.nbytes for one in host))
    sizes = tuple(piece.numel() for piece in pieces)
    return Cargo(rest, pieces, CargoManifest(tuple(places), sizes))


def _is_there(buffer: Buffer, on_device: OnDevice) -> bool:
    return isinstance(buffer.source, Tensor) and on_device(buffer.source)


def _flat(tensor: Tensor) -> Tensor:
    """A tensor's elements in order, as bytes: where they lie, if they lie in order."""
    in_order = tensor.detach().contiguous()
    # Not by a view: a dimension of one element may have any stride.
    return in_order.as_strided((in_order.numel(),), (1,)).view(torch.uint8)
