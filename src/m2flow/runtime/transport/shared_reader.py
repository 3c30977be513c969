"""The reader's side of shared memory: what a handle says, and values as views of what it names.

A reader has a byte beside every block of a hand-over and sets it to the hand-over's turn when its
last view of the block is gone: no message, and no lock.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
import weakref
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from m2flow.runtime.transport.buffers import Memory
from m2flow.runtime.transport.sweeping import FOLDER
from m2flow.runtime.transport.wire import unpack

Region: TypeAlias = tuple[bytes, int, int, int, int, int]
"""One block as a reader needs to know it: the file's name and its whole size; where the block
begins in it, and its size; where the byte of this hand-over stands; what the reader writes there
when it is done."""


class SharedHandle(NamedTuple):
    """A value in shared memory, to be sent to its reader.

    Attributes:
        head: `Packed.head`.
        regions: the blocks in which it lies.
        extents: for each buffer (region, first byte within it, bytes).
    """

    head: bytes
    regions: tuple[Region, ...]
    extents: tuple[tuple[int, int, int], ...]

    def to_bytes(self) -> bytes:
        """The handle for a pipe or a socket."""
        return pickle.dumps(tuple(self), 5)

    @classmethod
    def from_bytes(cls, data: Any) -> SharedHandle:
        """The handle that `to_bytes` gave."""
        return cls._make(pickle.loads(data))


class SharedReader:
    """Maps files once, and reads values as views of them."""

    def __init__(self) -> None:
        self._mappings: dict[bytes, tuple[mmap.mmap, int]] = {}
        self._look_at = 0
        self._lock = threading.Lock()

    def read(self, handle: SharedHandle, *, device: str | torch.device | None = None) -> Any:
        """The value behind a handle, without a copy; to be read once.

        Args:
            handle: what `SharedPool.write` returned.
            device: as in `unpack`.

        Raises:
            FileNotFoundError: the owner has closed its pool.
        """
        blocks: list[Memory] = []
        for segment, size, start, nbytes, flag, turn in handle.regions:
            mapping = self._map(segment, size)
            # An array of its own, which every view made from it keeps alive.
            block = np.ndarray((nbytes,), np.uint8, mapping, start)
            weakref.finalize(block, _give_back, mapping, flag, turn, os.getpid())
            blocks.append(block)
        buffers = [blocks[region][start : start + size] for region, start, size in handle.extents]
        return unpack(handle.head, buffers, device=device)

    def let_go(self) -> None:
        """Drop mappings of files that the owner, or who cleared up after it, has unlinked."""
        with self._lock:
            self._drop_unlinked()

    def close(self) -> None:
        """Drop the mappings; values that were read keep theirs until they die."""
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
                if len(self._mappings) >= self._look_at:
                    self._drop_unlinked()
                descriptor = os.open(FOLDER / segment.decode(), os.O_RDWR | os.O_CLOEXEC)
                try:
                    self._mappings[segment] = (mmap.mmap(descriptor, nbytes), descriptor)
                except OSError:
                    os.close(descriptor)
                    raise
            return self._mappings[segment][0]

    def _drop_unlinked(self) -> None:
        """As `let_go`; with twice as many mappings as are left, it is time again."""
        for segment, (_, descriptor) in list(self._mappings.items()):
            if os.fstat(descriptor).st_nlink == 0:
                os.close(descriptor)
                del self._mappings[segment]
        self._look_at = 2 * len(self._mappings)


def _give_back(mapping: mmap.mmap, flag: int, turn: int, process: int) -> None:
    # Runs wherever the garbage collector does, under any lock, and at the end: takes none. What a
    # process read it gives back itself; in a fork the copies die without a word.
    if os.getpid() == process:
        mapping[flag] = turn
