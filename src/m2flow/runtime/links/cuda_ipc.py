"""Hand-over between two lanes on one GPU: device memory is opened by the other process, not copied.

A further link for `PayloadServer` and `Peers` (`links={"cuda_ipc": CudaIPC()}`), on top of the
handles that torch.multiprocessing makes: torch keeps the sender's memory until the receiver's
tensors die. Both lanes must see the same device, and the receiver must not be the sender's own
process. What is no CUDA tensor travels by value. Written on a machine without a GPU: the part for
values in host memory is tested, the part for CUDA tensors has never run.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor

from m2flow.runtime.links.buffers import Buffer, Memory
from m2flow.runtime.links.wire import StructurePickler, unpack


class Token(NamedTuple):
    """A value, its CUDA tensors as handles.

    Attributes:
        head: the structure with the handles.
        memory: the elements of tensors and arrays in host memory.
    """

    head: bytes
    memory: list[Memory]


class CudaIPC:
    """The link `cuda_ipc`. Values must be importable where they arrive: no lambdas."""

    def put(self, value: Any) -> Token:
        """The token for a value."""
        file, buffers = BytesIO(), list[Buffer]()
        _HandlePickler(file, buffers).dump(value)
        return Token(file.getvalue(), [buffer.memory() for buffer in buffers])

    def get(self, token: Token, timeout: float) -> Any:
        """The value behind a token: opened at once, whatever the timeout."""
        del timeout
        return unpack(token.head, token.memory)


class _HandlePickler(StructurePickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            plain = value if value.is_leaf else value.detach()
            return reduce_tensor(plain)
        return super().reducer_override(value)
