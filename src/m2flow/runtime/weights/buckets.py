"""Bucketed broadcast: many tensors of any dtypes over a process group, in few large messages.

Small tensors are packed into byte buckets; while one bucket is on its way the next is packed, so
that two are in memory at most. A tensor as large as a bucket is sent from, and received into, its
own memory in pieces of bucket size. Every rank computes the same messages from the tensors' shapes
and dtypes, so these must agree and nothing else is exchanged. Bits arrive as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.runtime.weights.bits import as_bytes

ALIGNMENT = 16
"""Bytes to which tensors are aligned in a bucket, so that each can be viewed as its dtype."""

IN_FLIGHT = 2
"""Messages under way at a time: one that travels and one that is being packed or unpacked."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A run of bytes of a tensor in a bucket.

    Attributes:
        tensor: position of the tensor in the list.
        start: first byte within the tensor.
        offset: first byte within the bucket.
        num_bytes: how many.
    """

    tensor: int
    start: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message: several whole small tensors, or a run of one large tensor."""

    slots: tuple[Slot, ...]
    num_bytes: int
    direct: bool = False


def pack(sizes: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """The messages for tensors of these many bytes, in order; empty tensors take no part."""
    assert bucket_bytes >= ALIGNMENT, bucket_bytes
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size >= bucket_bytes:
            for start in range(0, size, bucket_bytes):
                run = min(bucket_bytes, size - start)
                buckets.append(Bucket((Slot(index, start, 0, run),), run, direct=True))
            continue
        if not size:
            continue
        offset = -(-filled // ALIGNMENT) * ALIGNMENT
        if offset + size > bucket_bytes:
            buckets.append(Bucket(tuple(slots), filled))
            slots, offset = [], 0
        slots.append(Slot(index, 0, offset, size))
        filled = offset + size
    if slots:
        buckets.append(Bucket(tuple(slots), filled))
    return buckets


@torch.no_grad()
def broadcast_in_buckets(
    tensors: Sequence[Tensor],
    src: int,
    group: Any = None,
    bucket_bytes: int = 32 << 20,
) -> None:
    """Make the tensors of every rank those of `src`. Collective; blocks until they are there.

    On an accelerator "there" means in the order of the current stream.

    Args:
        tensors: of the same shapes and dtypes on every rank, on a device that the group serves.
            Written to on every rank but `src`; not contiguous ones pass through a copy.
        src: global rank of the sender.
        group: the process group; None for all ranks.
        bucket_bytes: size of a message; about a tenth of a second's worth of the slowest link at
            most, and far above its latency's worth.
    """
    if not tensors:
        return
    sending = dist.get_rank() == src
    # Of a tensor that is not contiguous a receiver needs memory only, the sender the values.
    flat = [
        t if t.is_contiguous() else t.contiguous() if sending else _like(t)
        for t in (t.detach() for t in tensors)
    ]
    raw = [as_bytes(t) for t in flat]
    messages = pack([t.numel() for t in raw], bucket_bytes)
    rooms = _rooms(messages, tensors[0].device)
    under_way: list[tuple[Any, Bucket, Tensor]] = []

    def finish_oldest() -> None:
        work, bucket, message = under_way.pop(0)
        work.wait()
        if not (sending or bucket.direct):
            for slot in bucket.slots:
                raw[slot.tensor].copy_(message[slot.offset : slot.offset + slot.num_bytes])

    for bucket in messages:
        if len(under_way) == IN_FLIGHT:
            finish_oldest()
        if bucket.direct:
            (slot,) = bucket.slots
            message = raw[slot.tensor][slot.start : slot.start + slot.num_bytes]
        else:
            message = next(rooms)[: bucket.num_bytes]
            for slot in bucket.slots if sending else ():
                message[slot.offset : slot.offset + slot.num_bytes].copy_(raw[slot.tensor])
        work = dist.broadcast(message, src=src, group=group, async_op=True)
        under_way.append((work, bucket, message))
    while under_way:
        finish_oldest()
    if not sending:
        for tensor, received in zip(tensors, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.detach().copy_(received)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _rooms(messages: Sequence[Bucket], device: torch.device) -> Iterator[Tensor]:
    """Memory to pack in, in turns: by the time one comes round again, its message has arrived."""
    size = max((m.num_bytes for m in messages if not m.direct), default=0)
    rooms = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]
    while True:
        yield from rooms
