"""`HostMemoryShelf`: bytes in pinned host memory, for state on an accelerator.

Pinning is slow, so the memory is kept between switches; it grows to the largest state it has held.
It comes in blocks of a size at which the allocator of pinned memory rounds nothing up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from m2flow.runtime.lane.state.storages import as_bytes

BLOCK_BYTES = 256 << 20


class HostMemoryShelf:
    """Args: device: where the storages live. block_bytes: size of a block of pinned memory."""

    def __init__(self, device: torch.device, block_bytes: int = BLOCK_BYTES) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._blocks: list[Tensor] = []

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        pin = self._device.type == "cuda"
        while len(self._blocks) * self._block_bytes < sum(one.nbytes() for one in storages):
            self._blocks.append(torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=pin))
        self._copy((there, here) for here, there in self._pieces(storages))

    def settle(self) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()

    def take(self, away: Sequence[tuple[UntypedStorage, int]]) -> None:
        for storage, num_bytes in away:
            storage.resize_(num_bytes)
        self._copy(self._pieces([storage for storage, _ in away]))

    def clear(self) -> None:
        """The blocks are kept for the next time."""

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy to the first of each pair; done when this ends."""
        try:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        finally:
            # Also after an error: memory must not be given back under a copy that still runs.
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def _pieces(self, storages: Sequence[UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Equal pieces of the storages and of the blocks, in order."""
        block, used = 0, 0
        for storage in storages:
            rest = as_bytes(storage)
            while rest.numel():
                if used == self._block_bytes:
                    block, used = block + 1, 0
                size = min(rest.numel(), self._block_bytes - used)
                yield rest[:size], self._blocks[block][used : used + size]
                rest, used = rest[size:], used + size
