"""Heads of the two values that are sent most: a bare tensor, and a Batch of plain columns.

A tensor's is a few bytes. A Batch's is a pickle of tuples alone, which the C pickler writes without
a call into Python for each column. What is not plain in this sense gets None: `wire` pickles it.
The first byte tells the heads apart; a pickle begins with 0x80.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from m2flow.flow.batch import Batch, Ragged
from m2flow.runtime.transport.buffers import (
    CODES,
    DTYPES,
    NUMPY_DTYPES,
    Buffer,
    as_tensor,
    is_plain,
    tensor_over,
)

TENSOR_HEAD = 0x01
BATCH_HEAD = 0x02

_TENSOR_START = struct.Struct("<BBB")  # TENSOR_HEAD, dtype, number of dimensions
SHAPES = [struct.Struct(f"<{dimensions}Q") for dimensions in range(65)]
_ENDS = [_TENSOR_START.size + shape.size for shape in SHAPES]
_BATCH_START = bytes([BATCH_HEAD])
_VALUES = {str, int, float, bool, type(None)}


def tensor_head(tensor: torch.Tensor) -> tuple[bytes, list[Buffer]] | None:
    """Head and buffers of a bare tensor, if it is plain and not empty."""
    if not is_plain(tensor) or not (nbytes := tensor.nbytes):
        return None
    shape = tensor.shape
    dimensions = len(shape)
    head = _TENSOR_START.pack(TENSOR_HEAD, CODES[tensor.dtype], dimensions)
    return head + SHAPES[dimensions].pack(*shape), [Buffer(tensor, nbytes, tensor.data_ptr())]


def tensor_behind(head: Any, memory: Any) -> torch.Tensor:
    """The tensor of a `tensor_head`, over its memory."""
    _, code, dimensions = _TENSOR_START.unpack_from(head)
    shape = SHAPES[dimensions].unpack_from(head, _TENSOR_START.size)
    return tensor_over(memory, DTYPES[code], shape)


def batch_head(batch: Batch) -> tuple[bytes, list[Buffer]] | None:
    """Head and buffers of a Batch whose columns are plain tensors, Ragged over such, or lists of
    strings and numbers."""
    columns = batch.columns
    specs: list[Any] = []
    buffers: list[Buffer] = []
    tensors: set[int] = set()
    for column in columns.values():
        lengths = None
        kind = type(column)
        if kind is list:
            if not _VALUES.issuperset(map(type, column)):
                return None
            specs.append(column)
            continue
        if kind is Ragged:
            if id(column) in tensors:
                return None
            tensors.add(id(column))
            lengths, column = column.lengths, column.values
        if type(column) is not torch.Tensor or not is_plain(column):
            return None
        if id(column) in tensors:  # one object under two names is to arrive as one
            return None
        tensors.add(id(column))
        if nbytes := column.nbytes:
            buffers.append(Buffer(column, nbytes, column.data_ptr()))
        specs.append((CODES[column.dtype], tuple(column.shape), lengths))
    return _BATCH_START + pickle.dumps((batch.ids, tuple(columns), specs), 5), buffers


def batch_behind(head: Any, buffers: Iterable[Any]) -> Batch:
    """The Batch of a `batch_head`, over the memory of its buffers."""
    ids, names, specs = pickle.loads(memoryview(head)[1:])
    return batch_of(dict(zip(names, _columns(specs, iter(buffers)), strict=True)), ids)


def _columns(specs: list[Any], memory: Iterator[Any]) -> Iterator[Any]:
    for spec in specs:
        if type(spec) is list:
            yield spec
            continue
        code, shape, lengths = spec
        dtype = DTYPES[code]
        if 0 in shape:
            values = torch.empty(shape, dtype=dtype)
        else:
            values = as_tensor(np.ndarray(shape, NUMPY_DTYPES[dtype], next(memory)), dtype)
        yield values if lengths is None else ragged_of(values, lengths)


def batch_of(columns: dict[str, Any], ids: tuple[int, ...]) -> Batch:
    """A Batch that was checked when it was made."""
    batch = Batch.__new__(Batch)
    batch.columns = columns
    batch.ids = ids
    return batch


def ragged_of(values: Any, lengths: tuple[int, ...]) -> Ragged:
    """A Ragged that was checked when it was made."""
    ragged = Ragged.__new__(Ragged)
    ragged.values = values
    ragged.lengths = lengths
    return ragged
