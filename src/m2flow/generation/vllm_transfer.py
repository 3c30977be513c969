"""Weights for a vLLM beside the lane, on the lane's own accelerator, without a way over the host.

vLLM's weight transfer over CUDA IPC (backend `ipc`, packed): the owner of the weights fills one
buffer again and again, and vLLM copies out of it what an update describes before the next one. An
update is start, some pieces, finish; between start and finish the weights are neither old nor new.
Written after the code of vLLM 0.32, and not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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


def updates(weights: Mapping[str, Tensor], device: str) -> Iterator[dict[str, Any]]:
    """Yield vLLM's `update_info` of one piece after the other, each filled into the same buffer.

    A piece must have been taken in before the next is asked for.
    """
    # Wide numbers first: each tensor then begins where its numbers may lie.
    ordered = sorted(weights.items(), key=lambda item: -item[1].element_size())
    total = sum(tensor.nbytes for _, tensor in ordered)
    largest = max(tensor.nbytes for _, tensor in ordered)
    buffer, handle = export(max(largest, min(total, BUFFER_BYTES)), device)
    piece: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in ordered:
        if filled + tensor.nbytes > buffer.numel():
            yield _update(piece, buffer, handle)
            piece, filled = [], 0
        numbers = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buffer[filled : filled + tensor.nbytes].copy_(numbers)
        piece.append((name, tensor))
        filled += tensor.nbytes
    yield _update(piece, buffer, handle)


def collect() -> None:
    """Free buffers that vLLM has let go of."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def _update(piece: list[tuple[str, Tensor]], buffer: Tensor, handle: Handle) -> dict[str, Any]:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)  # the other process reads it at once
    return {
        "names": [name for name, _ in piece],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in piece],
        "shapes": [list(tensor.shape) for _, tensor in piece],
        "tensor_sizes": [tensor.nbytes for _, tensor in piece],
        "ipc_handles": dict(handle),
    }
