"""Elements of tensors and arrays where they lie, and tensors over memory that arrived.

Hand-over of small values is a matter of microseconds, so what lies in order in host memory is known
by its address and copied by it, without a NumPy array in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

Memory: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""Bytes in host memory: a flat uint8 array."""

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Types of plain tensors; the place in this tuple stands for the type in messages. The complex
ones are not among them: they may be conjugated without a change to their bytes."""

CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}


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
        if self.address is not None:
            assert target.nbytes == self.nbytes, (target.nbytes, self.nbytes)
            copy_bytes(target.ctypes.data, self.address, self.nbytes)
        elif isinstance(source, torch.Tensor):
            torch.from_numpy(target).view(source.dtype).view(source.shape).copy_(source)
        elif isinstance(source, np.ndarray):
            np.copyto(target.view(source.dtype).reshape(source.shape), source)
        else:
            np.copyto(target, np.frombuffer(source, np.uint8))


copy_bytes = ctypes.memmove
"""`copy_bytes(target, source, nbytes)` between two addresses; other threads run meanwhile."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and the bytes at `data_ptr` say all about a tensor."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in CODES
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
    )


def tensor_over(memory: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor, not empty, over anything writable with a buffer, which it keeps alive.

    The array in between is made by one call: torch's own `frombuffer` and `view` take thrice the
    time.
    """
    tensor = torch.from_numpy(np.ndarray(shape, NUMPY_DTYPES[dtype], memory))
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:  # NumPy lacks bfloat16 and others: take the bits
        return _BITS[dtype.itemsize]


def _bytes_of(tensor: torch.Tensor) -> Memory:
    """A view of a contiguous host tensor's memory."""
    try:
        array = tensor.numpy()
    except TypeError:
        # Not as bytes at once: one element may have a stride that this does not forgive.
        array = tensor.view(_TORCH_BITS[tensor.itemsize]).numpy()
    return array.reshape(-1).view(np.uint8)


NUMPY_DTYPES = {dtype: _numpy_dtype(dtype) for dtype in DTYPES}
"""For each type of element NumPy's own, or one of as many bits."""
