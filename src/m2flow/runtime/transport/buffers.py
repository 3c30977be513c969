"""Elements of tensors and arrays where they lie, and tensors over memory that arrived.

Hand-over of small values is a matter of microseconds, so what lies in order in host memory is known
by its address and copied by it, without a NumPy array in between.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import torch

Memory: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""Bytes in host memory: a flat uint8 array."""

_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffer:
    """The elements of one tensor or array, still where they are.

    Attributes:
        source: the torch tensor, NumPy array or flat memoryview that holds them.
        nbytes: their size; never 0.
        address: where they lie in this process; None if not in order in host memory.
    """

    __slots__ = ("address", "nbytes", "source")

    def __init__(self, source: Any, nbytes: int, address: int | None = None) -> None:
        self.source = source
        self.nbytes = nbytes
        self.address = address

    def memory(self) -> Memory:
        """The elements in order, as bytes in host memory: a view where they lie so already.

        Of a tensor on the CPU a view means that its storage cannot be resized ever after.
        """
        source = self.source
        if isinstance(source, torch.Tensor):
            return _bytes_of(source.contiguous().cpu())
        if isinstance(source, np.ndarray):
            return np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        return np.frombuffer(source, np.uint8)

    def copy_to(self, target: Memory) -> None:
        """Copy the elements in order into `target`, of `nbytes` bytes: one copy, whatever the
        source's strides or device. A tensor's storage can still be resized after it."""
        source = self.source
        if isinstance(source, torch.Tensor):
            torch.from_numpy(target).view(source.dtype).view(source.shape).copy_(source)
        elif isinstance(source, np.ndarray):
            np.copyto(target.view(source.dtype).reshape(source.shape), source)
        else:
            np.copyto(target, np.frombuffer(source, np.uint8))


copy_bytes = ctypes.memmove
"""`copy_bytes(target, source, nbytes)` between two addresses; other threads run meanwhile."""


def _bytes_of(tensor: torch.Tensor) -> Memory:
    """A view of a contiguous host tensor's memory."""
    try:
        array = tensor.numpy()
    except TypeError:
        # Not as bytes at once: one element may have a stride that this does not forgive.
        array = tensor.view(_TORCH_BITS[tensor.itemsize]).numpy()
    return array.reshape(-1).view(np.uint8)
