"""The blocks of a shared-memory pool: files in /dev/shm, their pages, and who holds what.

Blocks come in powers of two; small ones share a file. Every block has 64 flags at the beginning of
its file; a hand-over to a reader (a lease) takes one of them, and is over when it holds the number
of its turn. Pages are reserved before they are touched: a full /dev/shm is a `PoolFull`,
not a SIGBUS. Nothing here locks: one thread at a time.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from m2flow.errors import M2FlowError
from m2flow.runtime.transport.buffers import Memory
from m2flow.runtime.transport.sweeping import FOLDER

PAGE = mmap.PAGESIZE
SLAB_BYTES = 4 << 20
"""Blocks smaller than this share a file; a larger one has its own."""

OLDEST_LOOKED_AT = 4
"""So many hand-overs are asked whether they are over before another block is taken."""

MAX_LEASES = 64
"""Of a block at a time."""


class PoolFull(M2FlowError):
    """The pool may not grow, and nothing in it is free: send by another link."""


class Lease(NamedTuple):
    """One hand-over of one block, to one reader.

    Attributes:
        flag: where its flag stands in the file.
        turn: what the reader writes there when it is done.
        reader: its name, or None.
    """

    flag: int
    turn: int
    reader: Hashable


@dataclass(slots=True, eq=False)
class Block:
    """Memory for one value at a time, and its hand-overs.

    Attributes:
        segment, start: the file it lies in, and where.
        flags: where its flags begin, in the file.
        resident: bytes whose pages are there.
        turn: the last hand-over's, 1 to 255 and round again.
        leases: hand-overs that are not known to be over.
        views_here: whether it is under a tensor of the owner's.
    """

    segment: BlockFile
    start: int
    flags: int
    resident: int = 0
    turn: int = 0
    leases: list[Lease] = field(default_factory=list)
    views_here: bool = False

    def take_back(self) -> bool:
        """End the leases whose readers are done. Returns True if the block is free."""
        if self.leases:
            flags = self.segment.mapping
            self.leases = [one for one in self.leases if flags[one.flag] != one.turn]
        return not self.leases and not self.views_here

    def lease(self, reader: Hashable) -> Lease | None:
        """Assign a flag to a reader. Returns None if no flag is left."""
        if self.leases:
            self.take_back()
        flag = self.leases[-1].flag + 1 if self.leases else self.flags
        if flag == self.flags + MAX_LEASES:
            return None
        # A flag is an answer to this hand-over alone: a late one to an earlier turn says nothing.
        self.turn = self.turn % 255 + 1
        lease = Lease(flag, self.turn, reader)
        self.leases.append(lease)
        self.segment.mapping[flag] = 0
        return lease


@dataclass(slots=True, eq=False)
class BlockFile:
    """A file of blocks of one size, after a table of their flags."""

    name: bytes
    path: Path
    nbytes: int
    descriptor: int
    mapping: mmap.mmap
    memory: Memory
    address: int
    block_bytes: int
    blocks: list[Block]


class Blocks:
    """All blocks of one pool.

    Args:
        prefix: how the files' names begin.
        max_bytes: how much memory they may take in all; None for what /dev/shm has.

    Attributes:
        bytes_resident: how much they take.
        segments: the files, by address.
        by_name: the files, by name.
    """

    def __init__(self, prefix: str, max_bytes: int | None) -> None:
        self.prefix = prefix
        self.max_bytes = max_bytes
        self.bytes_resident = 0
        self.segments: list[BlockFile] = []
        self.by_name: dict[bytes, BlockFile] = {}
        self._unique = f"{prefix}{os.getpid():x}-{secrets.token_hex(3)}-"
        self._count = 0
        self._addresses: list[int] = []
        self._free: dict[int, list[Block]] = {}
        self._busy: dict[int, deque[Block]] = {}
        self._closed = False
        self._unlink = weakref.finalize(self, _unlink_all, self.by_name, os.getpid())

    def in_use(self) -> int:
        """Blocks that some reader, or the owner, still holds."""
        return sum(not block.take_back() for one in self.segments for block in one.blocks)

    def close(self) -> None:
        """Unlink the files; memory that is mapped stays valid until it is unmapped."""
        self._closed = True
        self._unlink()
        for segment in self.segments:
            os.close(segment.descriptor)
        self.segments.clear()
        self._addresses.clear()
        self._free.clear()
        self._busy.clear()

    def locate(self, address: int) -> tuple[Block, int] | None:
        """Return the block that holds an address, and the offset of the address in the block."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        segment = self.segments[at]
        within = address - segment.address - segment.blocks[0].start
        if within < 0:
            return None
        index, within = divmod(within, segment.block_bytes)
        return (segment.blocks[index], within) if index < len(segment.blocks) else None

    def take(self, nbytes: int) -> Block:
        """A block of at least this size, free until it is leased.

        Raises:
            PoolFull: there is no room.
        """
        if self._closed:
            raise RuntimeError(f"the pool {self.prefix!r} is closed")
        size = _block_bytes(nbytes)
        busy, free = self._busy.setdefault(size, deque()), self._free.setdefault(size, [])
        # Where each hand-over ends before the next begins, the newest block is free, and warm.
        if busy and (block := busy[-1]).take_back() and block.resident >= nbytes:
            return block
        # The oldest hand-overs are the likeliest to be over. One that lasts goes to the end, so
        # that it hides no others.
        for _ in range(min(len(busy), OLDEST_LOOKED_AT)):
            block = busy.popleft()
            if block.take_back():
                free.append(block)
                break
            busy.append(block)
        if not free:
            self.take_back(size)
        if not free:
            free.extend(self._new_segment(size, nbytes).blocks[::-1])
        block = free.pop()
        try:
            self._make_resident(block, nbytes)
        except PoolFull:
            self._free[size].append(block)
            raise
        self._busy[size].append(block)
        return block

    def take_back(self, size: int) -> None:
        """Move the blocks of a size whose leases have all ended to the free ones."""
        for _ in range(len(self._busy[size])):
            block = self._busy[size].popleft()
            (self._free if block.take_back() else self._busy)[size].append(block)

    def _make_resident(self, block: Block, nbytes: int) -> None:
        """Reserve the block's pages, up to `nbytes`, making room if need be."""
        wanted = min(_whole_pages(nbytes), block.segment.block_bytes) - block.resident
        if wanted <= 0:
            return
        if self.max_bytes is not None and self.bytes_resident + wanted > self.max_bytes:
            self._make_room(self.bytes_resident + wanted - self.max_bytes, block)
            if self.bytes_resident + wanted > self.max_bytes:
                raise PoolFull(self._full(wanted, f"max_bytes is {self.max_bytes:,}"))
        descriptor, start = block.segment.descriptor, block.start + block.resident
        try:
            os.posix_fallocate(descriptor, start, wanted)
        except OSError:
            self._make_room(wanted, block)
            try:
                os.posix_fallocate(descriptor, start, wanted)
            except OSError as error:
                raise PoolFull(self._full(wanted, f"{FOLDER} has no room")) from error
        block.resident += wanted
        self.bytes_resident += wanted

    def _full(self, wanted: int, why: str) -> str:
        return (
            f"no room for {wanted:,} bytes in the shared-memory pool {self.prefix!r}: "
            f"{self.bytes_resident:,} are held and {why}"
        )

    def _make_room(self, nbytes: int, spare: Block) -> None:
        """Give back whole files that nobody uses, largest blocks first, until enough is gone."""
        for size in sorted(self._busy, reverse=True):
            self.take_back(size)
        for segment in sorted(self.segments, key=lambda one: one.block_bytes, reverse=True):
            if nbytes <= 0:
                return
            held = sum(block.resident for block in segment.blocks)
            free = self._free[segment.block_bytes]
            if held and segment is not spare.segment and set(segment.blocks) <= set(free):
                self._free[segment.block_bytes] = [
                    one for one in free if one.segment is not segment
                ]
                self._drop(segment)
                self.bytes_resident -= held
                nbytes -= held

    def _new_segment(self, size: int, nbytes: int) -> BlockFile:
        count = max(1, SLAB_BYTES // size)
        table = _whole_pages(count * MAX_LEASES)
        total = table + count * size
        name = f"{self._unique}{self._count}"
        self._count += 1
        path = FOLDER / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:  # such as no more descriptors
            raise PoolFull(self._full(nbytes, f"no file can be made in {FOLDER}")) from error
        try:
            os.ftruncate(descriptor, total)
            os.posix_fallocate(descriptor, 0, table)
            mapping = mmap.mmap(descriptor, total)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            raise PoolFull(self._full(nbytes, f"{FOLDER} has no room")) from error
        memory = np.ndarray((total,), np.uint8, mapping)
        address = memory.__array_interface__["data"][0]
        file = name.encode()
        segment = BlockFile(file, path, total, descriptor, mapping, memory, address, size, [])
        segment.blocks.extend(
            Block(segment, table + i * size, i * MAX_LEASES) for i in range(count)
        )
        self.by_name[file] = segment
        insort(self.segments, segment, key=lambda one: one.address)
        insort(self._addresses, address)
        return segment

    def _drop(self, segment: BlockFile) -> None:
        self.segments.remove(segment)
        self._addresses.remove(segment.address)
        del self.by_name[segment.name]
        os.close(segment.descriptor)
        segment.path.unlink(missing_ok=True)


def _block_bytes(nbytes: int) -> int:
    """The next power of two, at least a page. Pages that are not touched cost nothing."""
    return max(PAGE, 1 << (nbytes - 1).bit_length())


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _unlink_all(segments: dict[bytes, BlockFile], owner: int) -> None:
    if os.getpid() == owner:  # a fork has the same list, and no right to it
        for segment in segments.values():
            segment.path.unlink(missing_ok=True)
