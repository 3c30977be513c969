"""Hand-over on one node through shared memory that is used again and again.

A `SharedPool` belongs to one process and writes; any process on the node reads, by a small
`SharedHandle`. What is read are views of the pool's own memory: no copy, and no message when they
die. Each reader has a byte beside the block, sets it when its last view is gone, and the owner
takes the block back when it next needs one. What is read must not be changed in place: other
readers, and for `pool.empty` the owner too, see the same memory.

Nothing leaks for ever: a reader that died is named in `forget`, a handle that never arrived in
`release`. Readers without names cannot be told apart, so when one of them dies the block comes back
by `release` alone, once the others are done too: name readers that may die. Closing the pool (or
the end of its process) unlinks its files, and those of a process that was killed are unlinked by
`sweep`. Files in /dev/shm are opened directly, because Python's `multiprocessing.shared_memory`
unlinks in readers what the owner still needs.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from m2flow.runtime.transport.blocks import MAX_READERS, Block, Blocks, Lease, PoolFull
from m2flow.runtime.transport.buffers import ALIGNMENT, CODES, Buffer, copy_bytes, is_plain
from m2flow.runtime.transport.shared_reader import Parts, Region, SharedHandle, SharedReader
from m2flow.runtime.transport.sweeping import sweep
from m2flow.runtime.transport.wire import Packed, pack

__all__ = ["PoolFull", "SharedHandle", "SharedPool", "SharedReader", "sweep"]

HEAD_IN_HANDLE = 16 << 10
"""A larger head lies in the block too, so that the handle stays small."""


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
    def prefix(self) -> str:
        """How the files' names begin."""
        return self._blocks.prefix

    @property
    def bytes_resident(self) -> int:
        """How much memory it takes."""
        return self._blocks.bytes_resident

    def write(self, value: Any, readers: int | Sequence[Hashable] = 1) -> SharedHandle:
        """Put a value (or one `Packed` already) where others can read it.

        What lies in a tensor of `empty` is handed over where it is; all else is copied once.

        Args:
            value: what to hand over.
            readers: how many will read it, or their names, for `forget`. At most 64.

        Raises:
            PoolFull: there is no room.
        """
        names: Sequence[Hashable] = (
            (None,) * readers if isinstance(readers, int) else tuple(readers)
        )
        if not 1 <= len(names) <= MAX_READERS:
            raise ValueError(f"a value has 1 to {MAX_READERS} readers, not {len(names)}")
        if type(value) is torch.Tensor and is_plain(value) and (nbytes := value.nbytes):
            return self._write_tensor(value, nbytes, names)
        packed = value if isinstance(value, Packed) else pack(value)
        buffers: list[Buffer] = list(packed.buffers)
        head = packed.head
        if len(head) > HEAD_IN_HANDLE:
            buffers.insert(0, Buffer(memoryview(head), len(head)))
            head = b""
        parts = Parts(head, [], [(0, 0, 0)] * len(buffers))
        leased: dict[Block, tuple[int, Lease]] = {}
        copied: list[int] = []
        needed = 0
        target = None
        with self._lock:
            for position, buffer in enumerate(buffers):
                nbytes = buffer.nbytes
                if self._made and (
                    found := self._located(buffer.address, names, parts.regions, leased)
                ):
                    parts.extents[position] = (*found, nbytes)
                else:
                    copied.append(position)
                    parts.extents[position] = (-1, needed, nbytes)
                    needed += (nbytes + ALIGNMENT - 1) & -ALIGNMENT
            if copied:
                try:
                    target = self._blocks.take(needed)
                except PoolFull:
                    _end(leased)
                    raise
                lease = target.lease(names)
                assert lease is not None, "a fresh block has room for 64 readers"
                leased[target] = len(parts.regions), lease
                parts.regions.append(_region(target, needed, lease))
        if target is not None:
            try:
                self._copy(buffers, copied, parts, target)
            except BaseException:
                with self._lock:
                    _end(leased)
                raise
        return SharedHandle.of_parts(parts, len(names), packed.nbytes)

    def _write_tensor(
        self, tensor: torch.Tensor, nbytes: int, names: Sequence[Hashable]
    ) -> SharedHandle:
        """As `write`, for what is sent most: one buffer, and nothing to pickle."""
        address = tensor.data_ptr()
        with self._lock:
            found = self._blocks.locate(address) if self._made else None
            if found is None or (lease := found[0].lease(names)) is None:
                found = self._blocks.take(nbytes), 0
                lease = found[0].lease(names)
                assert lease is not None, "a fresh block has room for 64 readers"
        block, within = found
        segment = block.segment
        start = block.start + within
        if segment.address + start != address:
            copy_bytes(segment.address + start, address, nbytes)
        return SharedHandle.of_tensor(
            CODES[tensor.dtype],
            tensor.shape,
            len(names),
            lease.turn,
            lease.first,
            segment.name,
            segment.nbytes,
            start,
        )

    @staticmethod
    def _copy(buffers: list[Buffer], copied: list[int], parts: Parts, target: Block) -> None:
        """Copy into the block that is the last region, and say so in the extents."""
        region = len(parts.regions) - 1
        extents = parts.extents
        segment = target.segment
        for position in copied:
            buffer = buffers[position]
            _, within, nbytes = extents[position]
            extents[position] = (region, within, nbytes)
            start = target.start + within
            if buffer.address is not None:
                copy_bytes(segment.address + start, buffer.address, nbytes)
            else:
                buffer.copy_to(segment.memory[start : start + nbytes])

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

    def release(self, handle: SharedHandle) -> None:
        """Take back a handle that no reader has got, or will ever read again."""
        with self._lock:
            for name, first, turn in handle.leases:
                segment = self._blocks.by_name.get(name)
                if segment is not None:
                    block = segment.blocks[first // MAX_READERS]
                    block.leases = [
                        one for one in block.leases if (one.first, one.turn) != (first, turn)
                    ]

    def forget(self, reader: Hashable) -> None:
        """Stop waiting for a reader that died, in everything written with its name."""
        with self._lock:
            for segment in self._blocks.segments:
                for block in segment.blocks:
                    for lease in block.leases:
                        for slot, name in enumerate(lease.names):
                            if name is not None and name == reader:
                                segment.mapping[lease.first + slot] = lease.turn

    def blocks_in_use(self) -> int:
        """Blocks that some reader, or the owner, still holds."""
        with self._lock:
            return self._blocks.in_use()

    def close(self) -> None:
        """Unlink the files. What has been read stays valid until its views die."""
        with self._lock:
            self._blocks.close()

    def _located(
        self,
        address: int | None,
        names: Sequence[Hashable],
        regions: list[Region],
        leased: dict[Block, tuple[int, Lease]],
    ) -> tuple[int, int] | None:
        """Region and place in it of what lies in a block of this pool; None: to be copied."""
        if address is None or (found := self._blocks.locate(address)) is None:
            return None
        block, within = found
        if block not in leased:
            lease = block.lease(names)
            if lease is None:  # 64 readers hold it already
                return None
            leased[block] = len(regions), lease
            regions.append(_region(block, block.segment.block_bytes, lease))
        return leased[block][0], within


def _region(block: Block, nbytes: int, lease: Lease) -> Region:
    segment = block.segment
    return Region(segment.name, segment.nbytes, block.start, nbytes, lease.first, lease.turn)


def _end(leased: dict[Block, tuple[int, Lease]]) -> None:
    """Take hand-overs back that nobody was told of. Under the lock."""
    for block, (_, lease) in leased.items():
        block.leases = [one for one in block.leases if one is not lease]


def _view_died(block: Block, made: set[Block]) -> None:
    # Runs wherever the garbage collector does, perhaps under the pool's own lock: takes none.
    made.discard(block)
    block.views_here = False
