"""Memory for large items, used again: touching fresh pages costs ten times what a copy costs.

A host receives every item into memory that nobody else refers to, and knows when the item has gone.
"""

from __future__ import annotations

import contextlib
import mmap

LARGE_BYTES = 1 << 18
"""From here on memory comes from `mmap`, which aligns it, and is worth keeping."""

SPARE_BYTES = 256 << 20
"""Most memory that a host keeps without an item in it."""


def new_memory(num_bytes: int) -> memoryview:
    """Writable memory, in huge pages where it is large and the kernel has them."""
    if num_bytes < LARGE_BYTES:
        return memoryview(bytearray(num_bytes))
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class SpareMemory:
    """Pieces whose items have gone, by capacity: the power of two that holds the item."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._num_bytes = 0

    def take(self, num_bytes: int) -> memoryview:
        """Memory of that size, with anything in it."""
        if num_bytes < LARGE_BYTES:
            return new_memory(num_bytes)
        capacity = 1 << (num_bytes - 1).bit_length()
        free = self._free.get(capacity)
        if not free:
            return new_memory(capacity)[:num_bytes]
        self._num_bytes -= capacity
        return memoryview(free.pop())[:num_bytes]

    def give_back(self, memory: memoryview) -> None:
        """Nobody refers to what `take` gave any more."""
        piece = memory.obj
        if isinstance(piece, mmap.mmap) and self._num_bytes + len(piece) <= SPARE_BYTES:
            self._free.setdefault(len(piece), []).append(piece)
            self._num_bytes += len(piece)
