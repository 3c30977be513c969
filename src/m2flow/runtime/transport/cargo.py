"""The device part of a payload: the buffers that stay on the device, each a piece of its own.

The host part goes by the ways of host memory, in the same message. This module knows no CUDA: the
caller says which tensors lie on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from m2flow.runtime.transport.buffers import Buffer
from m2flow.runtime.transport.wire import Packed

OnDevice: TypeAlias = Callable[[Tensor], bool]
"""Whether a tensor's elements lie in the memory that the device's links can hand over."""


class Cargo(NamedTuple):
    """A payload, split into its host and device parts.

    Attributes:
        host: head and buffers in host memory, as a payload of their own.
        pieces: flat uint8 tensors on the device.
        places: for each of the payload's buffers, in order, whether it is a piece.
    """

    host: Packed
    pieces: list[Tensor]
    places: tuple[bool, ...]


def load(packed: Packed, on_device: OnDevice) -> Cargo:
    """Split a payload into host and device buffers, in the order of the current stream."""
    places = tuple(
        isinstance(buffer.source, Tensor) and on_device(buffer.source) for buffer in packed.buffers
    )
    host: list[Buffer] = []
    pieces: list[Tensor] = []
    for buffer, there in zip(packed.buffers, places, strict=True):
        if there:
            pieces.append(_flat(buffer.source))
        else:
            host.append(buffer)
    nbytes = len(packed.head) + sum(one.nbytes for one in host)
    return Cargo(Packed(packed.head, host, nbytes), pieces, places)


def together(places: Sequence[bool], host: Iterable[Any], pieces: Iterable[Tensor]) -> list[Any]:
    """The buffers in order, for `unpack`."""
    here, there = iter(host), iter(pieces)
    return [next(there) if on_device else next(here) for on_device in places]


def _flat(tensor: Tensor) -> Tensor:
    """A tensor's elements in order, as bytes: where they lie, if they lie in order."""
    in_order = tensor.detach().contiguous()
    # Not by a view: a dimension of one element may have any stride.
    return in_order.as_strided((in_order.numel(),), (1,)).view(torch.uint8)
