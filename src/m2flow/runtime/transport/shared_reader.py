"""The reader's side of shared memory: what a handle says, and values as views of what it names.

A bare tensor's handle is one fixed record; any other value's lists the blocks it lies in, the place
of each buffer and the head. Each reader has a byte beside every block of a hand-over and sets it to
the hand-over's turn when its last view of the block is gone: no message, and no lock.
"""

from __future__ import annotations

import atexit
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from m2flow.runtime.transport.buffers import DTYPES, NUMPY_DTYPES, Memory, as_tensor
from m2flow.runtime.transport.sweeping import FOLDER
from m2flow.runtime.transport.wire import unpack

SHAPES = [struct.Struct(f"<{dimensions}Q") for dimensions in range(65)]
"""A shape, by its number of dimensions."""

_TENSOR = 0x01
_PARTS = 0x02
# Kind, dtype, dimensions, readers, turn, bytes of the file's name; first flag; bytes of the file,
# first byte of the tensor. The name and the shape follow.
_TENSOR_START = struct.Struct("<6BxxIQQ")
_NAME_AT = _TENSOR_START.size
# Kind, readers, number of regions, of extents, bytes of the head and of the value. Regions (with
# their names), extents and the head follow.
_PARTS_START = struct.Struct("<BBHIIQ")
_REGION = struct.Struct("<QQQIBB")  # as Region, the name last and as its length
_EXTENT = struct.Struct("<QQQ")


class Region(NamedTuple):
    """One block as a reader needs to know it.

    Attributes:
        segment: the file's name.
        segment_bytes: its whole size.
        start: where the block begins in it, in bytes.
        nbytes: how much of it is used.
        flags: where the readers' bytes of this hand-over begin.
        turn: what a reader writes there when it is done.
    """

    segment: bytes
    segment_bytes: int
    start: int
    nbytes: int
    flags: int
    turn: int


class Parts(NamedTuple):
    """What the handle of a value other than a bare tensor says.

    Attributes:
        head: `Packed.head`, or empty where it is the first extent.
        regions: the blocks it lies in.
        extents: for each buffer (region, first byte within it, bytes).
    """

    head: bytes
    regions: list[Region]
    extents: list[tuple[int, int, int]]


class SharedHandle(NamedTuple):
    """A value in shared memory, to be sent to its readers.

    Attributes:
        data: all that it says, a few hundred bytes: what to send on a pipe or a socket.
    """

    data: bytes

    def to_bytes(self) -> bytes:
        """The handle for a pipe or a socket, without a pickler."""
        return self.data

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> SharedHandle:
        """The handle that `to_bytes` gave."""
        return cls(bytes(data))

    @property
    def readers(self) -> int:
        """How many will read it, each once, as reader 0, 1, ..."""
        return self.data[3] if self.data[0] == _TENSOR else self.data[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        if self.data[0] != _TENSOR:
            return int(_PARTS_START.unpack_from(self.data)[5])
        _, code, dimensions, _, _, name, *_ = _TENSOR_START.unpack_from(self.data)
        shape = SHAPES[dimensions].unpack_from(self.data, _NAME_AT + name)
        return int(prod(shape) * DTYPES[code].itemsize)

    @property
    def leases(self) -> list[tuple[bytes, int, int]]:
        """Of each block it lies in: the file's name, the first flag and the turn."""
        if self.data[0] != _TENSOR:
            return [(one.segment, one.flags, one.turn) for one in self.parts().regions]
        *_, turn, name, first, _, _ = _TENSOR_START.unpack_from(self.data)
        return [(self.data[_NAME_AT : _NAME_AT + name], first, turn)]

    @classmethod
    def of_tensor(
        cls,
        code: int,
        shape: Sequence[int],
        readers: int,
        turn: int,
        flags: int,
        segment: bytes,
        segment_bytes: int,
        start: int,
    ) -> SharedHandle:
        """The handle of a plain tensor whose elements begin at `start` in the file."""
        dimensions = len(shape)
        return cls(
            _TENSOR_START.pack(
                _TENSOR, code, dimensions, readers, turn, len(segment), flags, segment_bytes, start
            )
            + segment
            + SHAPES[dimensions].pack(*shape)
        )

    @classmethod
    def of_parts(cls, parts: Parts, readers: int, nbytes: int) -> SharedHandle:
        """The handle of any other value."""
        head, regions, extents = parts
        pieces = [_PARTS_START.pack(_PARTS, readers, len(regions), len(extents), len(head), nbytes)]
        for name, *numbers in regions:
            pieces += (_REGION.pack(*numbers, len(name)), name)
        pieces.append(struct.pack(f"<{3 * len(extents)}Q", *chain.from_iterable(extents)))
        pieces.append(head)
        return cls(b"".join(pieces))

    def parts(self) -> Parts:
        """What `of_parts` was given."""
        data = self.data
        _, _, regions_left, extents, head, _ = _PARTS_START.unpack_from(data)
        at = _PARTS_START.size
        regions = []
        for _ in range(regions_left):
            *numbers, name = _REGION.unpack_from(data, at)
            at += _REGION.size + name
            regions.append(Region(data[at - name : at], *numbers))
        end = at + extents * _EXTENT.size
        places = list(_EXTENT.iter_unpack(data[at:end]))
        return Parts(data[end : end + head], regions, places)


class _Held(weakref.ref[Any]):
    """Watches an array over a block, which every view of it keeps alive.

    Several times as cheap as `weakref.finalize`, which makes a record and counts.
    """

    __slots__ = ("flag", "mapping", "turn")
    flag: int
    mapping: mmap.mmap
    turn: int


_held: dict[int, _Held] = {}
"""By their own id: a reference that nobody holds never calls back."""


def _let_go(held: _Held) -> None:
    # Runs wherever the garbage collector does, under any lock: takes none.
    del _held[id(held)]
    held.mapping[held.flag] = held.turn


def _hold(array: Memory, mapping: mmap.mmap, flag: int, turn: int) -> None:
    held = _Held(array, _let_go)
    held.mapping = mapping
    held.flag = flag
    held.turn = turn
    _held[id(held)] = held


@atexit.register
def _let_go_of_all() -> None:
    for held in list(_held.values()):
        held.mapping[held.flag] = held.turn
    _held.clear()


# What a process read, it gives back itself; in a fork the copies die without a word.
os.register_at_fork(after_in_child=_held.clear)


class SharedReader:
    """Maps files once, and reads values as views of them."""

    def __init__(self) -> None:
        self._mappings: dict[bytes, tuple[mmap.mmap, int]] = {}
        self._lock = threading.Lock()

    def read(
        self,
        handle: SharedHandle,
        reader: int = 0,
        *,
        device: str | torch.device | None = None,
    ) -> Any:
        """The value behind a handle, without a copy; each reader reads it once.

        Args:
            handle: what `SharedPool.write` returned.
            reader: which of its readers this is.
            device: as in `unpack`.

        Raises:
            FileNotFoundError: the owner has closed its pool.
        """
        data = handle.data
        if data[0] == _TENSOR:
            _, code, dimensions, readers, turn, name, flags, size, start = (
                _TENSOR_START.unpack_from(data)
            )
            assert 0 <= reader < readers, f"reader {reader} of {readers}"
            shape_at = _NAME_AT + name
            segment = data[_NAME_AT:shape_at]
            known = self._mappings.get(segment)
            mapping = known[0] if known is not None else self._map(segment, size)
            dtype = DTYPES[code]
            shape = SHAPES[dimensions].unpack_from(data, shape_at)
            array = np.ndarray(shape, NUMPY_DTYPES[dtype], mapping, start)
            _hold(array, mapping, flags + reader, turn)
            return as_tensor(array, dtype)

        head, buffers = self.parts(handle, reader)
        return unpack(head, buffers, device=device)

    def parts(self, handle: SharedHandle, reader: int = 0) -> tuple[Any, list[Memory]]:
        """Head and buffers of a value that is no bare tensor, for whoever unpacks it himself."""
        assert 0 <= reader < handle.readers, f"reader {reader} of {handle.readers}"
        head, regions, extents = handle.parts()
        blocks: list[Memory] = []
        for segment, size, start, nbytes, flags, turn in regions:
            mapping = self._map(segment, size)
            # An array of its own, which every view made from it keeps alive.
            block = np.ndarray((nbytes,), np.uint8, mapping, start)
            _hold(block, mapping, flags + reader, turn)
            blocks.append(block)
        parts = [blocks[region][start : start + nbytes] for region, start, nbytes in extents]
        return (head, parts) if head else (parts[0], parts[1:])

    def close(self) -> None:
        """Let the mappings go; values that were read keep theirs until they die."""
        with self._lock:
            mappings, self._mappings = self._mappings, {}
            for _, descriptor in mappings.values():
                os.close(descriptor)

    def _map(self, segment: bytes, nbytes: int) -> mmap.mmap:
        known = self._mappings.get(segment)
        if known is not None:
            return known[0]
        with self._lock:
            if segment not in self._mappings:
                self._let_go_of_unlinked()
                descriptor = os.open(FOLDER / segment.decode(), os.O_RDWR | os.O_CLOEXEC)
                self._mappings[segment] = (mmap.mmap(descriptor, nbytes), descriptor)
            return self._mappings[segment][0]

    def _let_go_of_unlinked(self) -> None:
        """The owner makes a new file where it may just have given others back."""
        for segment, (_, descriptor) in list(self._mappings.items()):
            if os.fstat(descriptor).st_nlink == 0:
                os.close(descriptor)
                del self._mappings[segment]
