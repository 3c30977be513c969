"""`MemoryGauge`: how far the memory of a lane rises while a call runs.

On an accelerator what its allocator has handed out counts; on the CPU what is resident of the
process. The C library's heap keeps memory that is free, in which a call would not be seen to rise,
so that is given back first. Only where nothing else goes on in the process is it the call's own.
"""

from __future__ import annotations

import torch

from m2flow.runtime.lane.state.memory import (
    peak_resident_bytes,
    reset_peak_resident_bytes,
    return_free_memory,
)


class MemoryGauge:
    """Args: device: "cpu" or "cuda:0"."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._held: int | None = None

    def begin(self) -> None:
        """Count from what is held now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held = torch.cuda.memory_allocated(self._device)
            return
        return_free_memory()
        self._held = peak_resident_bytes() if reset_peak_resident_bytes() else None

    def risen(self) -> int | None:
        """Bytes of the highest level since `begin` above that at `begin`; None where the system
        does not tell."""
        if self._held is None:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self._held
        return max(0, peak_resident_bytes() - self._held)
