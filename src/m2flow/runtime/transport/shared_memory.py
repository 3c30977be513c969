"""Hand-over on one node through shared memory that is used again and again.

A `SharedPool` belongs to one process and writes; any process on the node reads, by a small
`SharedHandle`, which is good for one of them. What is read are views of the pool's own memory: no
copy, and no message when they die. The reader has a byte beside the block, sets it when its last
view is gone, and the owner takes the block back when it next needs one. What is read must not be
changed in place: for `pool.empty` the owner, and further readers, see the same memory.

Nothing leaks for ever: a reader that died is named in `forget`, a handle that never arrived in
`release`. Closing the pool (or the end of its process) unlinks its files, and those of a process
that was killed are unlinked by `sweep`. Files in /dev/shm are opened directly, because Python's
`multiprocessing.shared_memory` unlinks in readers what the owner still needs.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from m2flow.runtime.transport.blocks import MAX_LEASES, Block, Blocks, Lease, PoolFull
from m2flow.runtime.transport.buffers import Buffer, copy_bytes
from m2flow.runtime.transport.frame import aligned
from m2flow.runtime.transport.shared_reader import Region, SharedHandle, SharedReader
from m2flow.runtime.transport.sweeping import sweep
from m2flow.runtime.transport.wire import Packed, pack

__all__ = ["PoolFull", "SharedHandle", "SharedPool", "SharedReader", "sweep"]


class SharedPool:
    """The owner's side: memory that this process fills for others to read.

    Args:
        prefix: how the files' names begin; give `sweep` the same. It ends in a separator, so that
            no pool's prefix begins another's.
        max_bytes: how much memory it may take in all; None for what /dev/shm has.
    """

    def __init__(self, prefix: str, max_bytes: int | None = None) -> None:
        self._blocks = Blocks(prefix, max_bytes)
        self._lock = threading.Lock()
        self._made: set[Block] = set()  # those under tensors of the owner's

    @property
    def bytes_resident(self) -> int:
        """Bytes of memory that the pool takes."""
        return self._blocks.bytes_resident

    def write(self, value: Any, reader: Hashable = None) -> SharedHandle:
        """Put a value (or one `Packed` already) where another process can read it, once.

        What lies in a tensor of `empty` is handed over where it is; all else is copied once.

        Args:
            value: what to hand over.
            reader: name of who will read it, for `forget`.

        Raises:
            PoolFull: there is no room.
        """
        packed = value if isinstance(value, Packed) else pack(value)
        buffers = packed.buffers
        leases: dict[Block, Lease] = {}
        target: Block | None = None
        with self._lock:
            places = [self._located(buffer.address, reader, leases) for buffer in buffers]
            needed = sum(
                aligned(buffer.nbytes)
                for buffer, place in zip(buffers, places, strict=True)
                if place is None
            )
            if needed:
                try:
                    target = self._blocks.take(needed)
                except PoolFull:
                    _end(leases)
                    raise
                lease = target.lease(reader)
                assert lease is not None, "a fresh block is not leased"
                leases[target] = lease
        if target is not None:
            try:
                _copy(buffers, places, target)
            except BaseException:
                with self._lock:
                    _end(leases)
                raise
        numbers = {block: number for number, block in enumerate(leases)}
        regions = tuple(_region(block, lease) for block, lease in leases.items())
        extents = tuple(
            (numbers[place[0]], place[1], buffer.nbytes)
            for buffer, place in zip(buffers, places, strict=True)
            if place is not None
        )
        return SharedHandle(packed.head, regions, extents)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in the pool, its elements undefined: what is made in it needs no copy.

        Its memory is free again when the tensor and all its views are gone, here and in readers.

        Raises:
            PoolFull: there is no room.
        """
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        with self._lock:
            block = self._blocks.take(nbytes)
            block.views_here = True
        memory = np.frombuffer(block.segment.mapping, np.uint8, nbytes, block.start)
        self._made.add(block)
        weakref.finalize(memory, _view_died, block, self._made).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def is_read(self, made: torch.Tensor) -> bool:
        """Whether a reader still has views of what was handed over in a tensor of `empty`."""
        with self._lock:
            found = self._blocks.locate(made.data_ptr())
            if found is None:
                return False
            found[0].take_back()
            return bool(found[0].leases)

    def release(self, handle: SharedHandle) -> None:
        """Reclaim the blocks of a handle that nobody holds, or will read."""
        with self._lock:
            for name, _, _, _, flag, turn in handle.regions:
                segment = self._blocks.by_name.get(name)
                if segment is not None:
                    block = segment.blocks[flag // MAX_LEASES]
                    block.leases = [one for one in block.leases if one[:2] != (flag, turn)]

    def forget(self, reader: Hashable) -> None:
        """Stop waiting for a reader that died, in everything written with its name."""
        with self._lock:
            for segment in self._blocks.segments:
                for block in segment.blocks:
                    for lease in block.leases:
                        if lease.reader == reader:
                            segment.mapping[lease.flag] = lease.turn

    def blocks_in_use(self) -> int:
        """Blocks that some reader, or the owner, still holds."""
        with self._lock:
            return self._blocks.in_use()

    def close(self) -> None:
        """Unlink the files. What has been read stays valid until its views die."""
        with self._lock:
            self._blocks.close()

    def _located(
        self, address: int | None, reader: Hashable, leases: dict[Block, Lease]
    ) -> tuple[Block, int] | None:
        """Lease the block in which a buffer of this pool lies.

        Returns the block and the offset in it; None if the buffer must be copied.
        """
        if not self._made or address is None or (found := self._blocks.locate(address)) is None:
            return None
        block, _ = found
        if block not in leases:
            lease = block.lease(reader)
            if lease is None:  # 64 readers hold it already
                return None
            leases[block] = lease
        return found


def _copy(buffers: Sequence[Buffer], places: list[tuple[Block, int] | None], target: Block) -> None:
    """Copy the buffers without a place into a block, and set their places."""
    segment, within = target.segment, 0
    for position, buffer in enumerate(buffers):
        if places[position] is None:
            start = target.start + within
            if buffer.address is not None:
                copy_bytes(segment.address + start, buffer.address, buffer.nbytes)
            else:
                buffer.copy_to(segment.memory[start : start + buffer.nbytes])
            places[position] = target, within
            within += aligned(buffer.nbytes)


def _region(block: Block, lease: Lease) -> Region:
    segment = block.segment
    size = segment.block_bytes
    return segment.name, segment.nbytes, block.start, size, lease.flag, lease.turn


def _end(leases: dict[Block, Lease]) -> None:
    """End leases of which no reader was told. The caller holds the lock."""
    for block, lease in leases.items():
        block.leases = [one for one in block.leases if one is not lease]


def _view_died(block: Block, made: set[Block]) -> None:
    # Runs wherever the garbage collector does, perhaps under the pool's own lock: takes none.
    made.discard(block)
    block.views_here = False
