"""Tensors as bits: comparing them exactly, and a checksum that is fast on CPU and GPU alike.

Bits rather than numbers, so that -0.0 differs from 0.0 and a NaN equals itself.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

ROW = 1024
"""Words of 8 bytes in a row of the table that `checksum` sums up."""

BLOCK_BYTES = 1 << 20
"""Read at a time on a CPU: this much stays in its cache."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's elements as uint8, flat: a view of a contiguous tensor, of others a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_integers(tensor: Tensor) -> Tensor:
    """The tensor's elements as integers of the same width, flat: a view where contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a), as_bytes(b).to(a.device))


def changed_elements(old: Tensor, new: Tensor) -> Tensor:
    """Flat indices, int64 and ascending, of the elements whose bits differ; on the tensors' device.

    Args:
        old, new: of the same shape, dtype and device; elements of 8 bytes at most.
    """
    assert old.shape == new.shape, (old.shape, new.shape)
    assert old.dtype == new.dtype, (old.dtype, new.dtype)
    if old.device.type != "cpu":
        return as_integers(old).ne(as_integers(new)).nonzero().view(-1)
    # NumPy compares and lists twice as fast as torch, most of all block by block.
    old_integers, new_integers = _as_array(as_integers(old)), _as_array(as_integers(new))
    block = BLOCK_BYTES // old.element_size()
    found = [np.empty(0, np.int64)]
    for start in range(0, len(old_integers), block):
        unequal = old_integers[start : start + block] != new_integers[start : start + block]
        found.append(np.flatnonzero(unequal) + start)
    return torch.from_numpy(np.concatenate(found))


def checksum(tensor: Tensor) -> int:
    """32 bits that tell whether a tensor's bytes are what they were; the same on every device.

    The bytes are laid out as a table of `ROW` words to a row; what is summed up (modulo 2^64, which
    is exact in any order) are its rows and its columns, and the sums go through CRC-32. It finds
    any single damaged run of up to 8 KiB within a row and misplaced words, reads memory at close to
    its speed, and is no protection against an adversary.
    """
    raw = as_bytes(tensor)
    table_bytes = raw.numel() // (8 * ROW) * (8 * ROW)
    tail = _as_array(raw[table_bytes:].cpu())
    if raw.device.type == "cpu":
        columns, rows = _sums(_as_array(raw[:table_bytes]).view(np.int64).reshape(-1, ROW))
    else:
        table = raw[:table_bytes].clone() if raw.data_ptr() % 8 else raw[:table_bytes]
        words = table.view(torch.int64).view(-1, ROW)
        columns, rows = words.sum(0).cpu().numpy(), words.sum(1).cpu().numpy()
    found = zlib.crc32(raw.numel().to_bytes(8, "little"))
    for part in (columns, rows, tail):
        found = zlib.crc32(part.tobytes(), found)
    return found


def _as_array(tensor: Tensor) -> np.ndarray:
    """A look at a tensor on the CPU, while it stays where it is.

    `Tensor.numpy` would make the storage of a worker's weights one that no context switch can empty
    in place any more.
    """
    return np.from_dlpack(tensor)


def _sums(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the columns and of the rows, in one pass over memory."""
    columns = np.zeros(ROW, np.int64)
    rows = np.empty(len(words), np.int64)
    height = BLOCK_BYTES // (8 * ROW)
    for start in range(0, len(words), height):
        block = words[start : start + height]
        columns += np.add.reduce(block, axis=0)
        np.add.reduce(block, axis=1, out=rows[start : start + height])
    return columns, rows
