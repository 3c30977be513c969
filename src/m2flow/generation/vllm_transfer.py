"""Weights for a vLLM beside the lane, on the lane's own accelerator, without a way over the host.

vLLM's weight transfer over CUDA IPC (backend `ipc`, packed): the owner of the weights fills one
buffer again and again, and vLLM copies out of it what an update describes before the next one. An
update is start, some pieces, finish; between start and finish the weights are neither old nor new.
Written after the code of vLLM 0.32, and not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

BACKEND = {"backend": "ipc"}
"""vLLM's setting `weight_transfer_config`."""

INIT = {"packed": True}
"""What both sides agree on at the beginning."""

BUFFER_BYTES = 1 << 30
"""Of the buffer, unless a single tensor is larger."""

Handle = Mapping[str, tuple[Any, ...]]
"""By the accelerator's UUID, what opens a tensor's memory in another process."""


def export(num_bytes: int, device: str) -> tuple[Tensor, Handle]:
    """Return a buffer on an accelerator, and what opens it elsewhere for as long as it lives."""
    from torch.multiprocessing.reductions import reduce_tensor

    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _, arguments = reduce_tensor(buffer)
    return buffer, {str(torch.cuda.get_device_properties(buffer.device).uuid): arguments}


def updates(
    weights: Mapping[str, Tensor], device: str, alike: Mapping[str, Tensor] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield vLLM's `update_info` of one piece after the other, each filled into the same buffer.

    A piece must have been taken in before the next is asked for.

    Args:
        weights: tensors, which may be made when they are asked for: one at a time, and forgotten.
        device: of the buffer.
        alike: tensors of the same names, shapes and dtypes, none made for it; None: `weights`.
    """
    alike = weights if alike is None else alike
    described = [_described(name, alike[name]) for name in alike]
    # Wide numbers first: each tensor then begins where its numbers may lie.
    ordered = sorted(described, key=lambda one: -one.width)
    total, largest = sum(one.num_bytes for one in ordered), max(one.num_bytes for one in ordered)
    buffer, handle = export(max(largest, min(total, BUFFER_BYTES)), device)
    piece: list[_Described] = []
    filled = 0
    for one in ordered:
        if filled + one.num_bytes > buffer.numel():
            yield _update(piece, buffer, handle)
            piece, filled = [], 0
        numbers = weights[one.name].detach().contiguous().view(-1).view(torch.uint8)
        buffer[filled : filled + one.num_bytes].copy_(numbers)
        piece.append(one)
        filled += one.num_bytes
    yield _update(piece, buffer, handle)


class _Described(NamedTuple):
    """A tensor without its numbers, of which each has a width in bytes."""

    name: str
    dtype: str
    shape: list[int]
    width: int
    num_bytes: int


def _described(name: str, tensor: Tensor) -> _Described:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Described(name, dtype, list(tensor.shape), tensor.element_size(), tensor.nbytes)


def collect() -> None:
    """Free buffers that vLLM has let go of."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def _update(piece: list[_Described], buffer: Tensor, handle: Handle) -> dict[str, Any]:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)  # the other process reads it at once
    return {
        "names": [one.name for one in piece],
        "dtype_names": [one.dtype for one in piece],
        "shapes": [one.shape for one in piece],
        "tensor_sizes": [one.num_bytes for one in piece],
        "ipc_handles": dict(handle),
    }
