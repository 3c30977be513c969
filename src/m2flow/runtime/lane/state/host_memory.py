"""`HostMemoryShelf`: bytes in pinned host memory, for state on an accelerator.

Pinning is slow, so the memory is kept between switches; it grows to the largest state it has held.
It comes in blocks of a size at which the allocator of pinned memory rounds nothing up. Copies run
on a stream of their own, and so does the allocation of what comes back: state may return while
another worker's kernels are running, and waits for none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from m2flow.runtime.lane.state.storages import as_bytes

BLOCK_BYTES = 256 << 20


class HostMemoryShelf:
    """Args: device: where the storages live. block_bytes: size of a block of pinned memory."""

    def __init__(self, device: torch.device, block_bytes: int = BLOCK_BYTES) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._blocks: list[Tensor] = []
        self._stream: Any = None

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        self._reserve(sum(storage.nbytes() for storage in storages))
        with self._aside(after_current=True):
            for here, there in self._pieces(storages):
                there.copy_(here, non_blocking=True)

    def settle(self) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()

    @contextmanager
    def filling(self) -> Iterator[None]:
        with self._aside(after_current=False):
            yield

    def grow(self, storage: UntypedStorage, num_bytes: int) -> None:
        storage.resize_(num_bytes)

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        for here, there in self._pieces(storages):
            here.copy_(there, non_blocking=True)

    def clear(self) -> None:
        """The blocks are kept for the next time."""

    @contextmanager
    def _aside(self, *, after_current: bool) -> Iterator[None]:
        """On the shelf's own stream; what was started there is done when this ends."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            make_stream: Any = torch.cuda.Stream  # not annotated in torch
            self._stream = make_stream(self._device)
        if after_current:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # Also after an error: memory must not be given back under a copy that still runs.
            self._stream.synchronize()

    def _reserve(self, num_bytes: int) -> None:
        while len(self._blocks) * self._block_bytes < num_bytes:
            pin = self._device.type == "cuda"
            self._blocks.append(torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=pin))

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
