"""How fast a machine copies, compares and checksums weights in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second, of one lane on its own.

    Attributes:
        copy: copying into memory that has been used before.
        compare: finding the elements that differ between two versions.
        checksum: checksumming.
    """

    copy: float = 8e9
    compare: float = 4e9
    checksum: float = 8e9

    @classmethod
    def measure(cls, device: str = "cpu", num_bytes: int = 16 << 20) -> Rates:
        """Measure them here; takes about 50 ms on a CPU.

        Args:
            device: where the weights lie.
            num_bytes: size of the weights to try with; larger than the caches.
        """
        import torch

        from m2flow.runtime.weights.bits import changed_elements, checksum

        old = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        new = old.clone()
        new[::100] = 1
        into = torch.zeros_like(old)

        def rate(work: Callable[[], object]) -> float:
            work()
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                work()
                if old.is_cuda:
                    torch.cuda.synchronize(old.device)
                seconds.append(time.perf_counter() - start)
            return num_bytes / min(seconds)

        return cls(
            copy=rate(lambda: into.copy_(new)),
            compare=rate(lambda: changed_elements(old, new)),
            checksum=rate(lambda: checksum(new)),
        )
