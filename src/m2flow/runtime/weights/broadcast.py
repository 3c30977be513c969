"""Broadcast of a snapshot over a process group, in buckets that follow each other down its tree."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 << 20
"""About a tenth of a second of a slow link, and far above any link's latency."""

IN_FLIGHT = 2
"""Buckets under way at a time."""


def broadcast(flat: Tensor, src: int, group: Any) -> None:
    """Make a tensor that of rank `src`. Collective; on a GPU in the current stream's order.

    Args:
        flat: uint8, contiguous, of the same size on every rank; written to on all but `src`.
        src: global rank of the sender.
        group: the process group.
    """
    under_way: deque[Any] = deque()
    for bucket in flat.split(BUCKET_BYTES):
        if len(under_way) == IN_FLIGHT:
            under_way.popleft().wait()
        under_way.append(dist.broadcast(bucket, src=src, group=group, async_op=True))
    for work in under_way:
        work.wait()
