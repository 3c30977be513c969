"""`HostMemoryShelf`: bytes in pinned host memory, for state on an accelerator.

Pinning is slow, so the memory is kept between switches; it grows to the largest state it has held.
It comes in blocks, which are filled by all threads of torch in huge pages before they are pinned:
CUDA's own allocation does both page by page, in one thread (1.7 GB/s on an H200's host).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from m2flow.runtime.lane.state.memory import use_huge_pages
from m2flow.runtime.lane.state.storages import as_bytes

BLOCK_BYTES = 256 << 20

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class HostMemoryShelf:
    """Pinned memory for one state.

    Args:
        device: where the storages live.
        to_come: gives bytes for which room is made beside what is put.
        block_bytes: size of a block.
    """

    def __init__(
        self,
        device: torch.device,
        to_come: Callable[[], int] = lambda: 0,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._device, self._to_come, self._block_bytes = device, to_come, block_bytes
        self._blocks: list[Tensor] = []

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        needed = self._to_come() + sum(one.nbytes() for one in storages)
        while len(self._blocks) * self._block_bytes < needed:
            self._blocks.append(self._block())
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

    def _block(self) -> Tensor:
        block = torch.empty(self._block_bytes, dtype=torch.uint8)
        use_huge_pages(block.untyped_storage())
        block.zero_()
        if self._device.type == "cuda":
            cuda, start = torch.cuda.cudart(), block.data_ptr()
            code = cuda.cudaHostRegister(start, block.nbytes, 0)
            if int(code) == _OUT_OF_MEMORY:  # torch's own error cannot be sent to the launcher
                held = len(self._blocks) * self._block_bytes
                raise MemoryError(
                    f"no room to pin {block.nbytes} bytes of host memory beside {held}"
                )
            torch.cuda.check_error(code)
            weakref.finalize(self, _unpin, block).atexit = False  # at the end the driver does it
        return block

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


def _unpin(block: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
