"""Channels of NCCL between two processes, which need not be in one world of torch.distributed.

Each is a communicator of two ranks that enqueues on a stream of its own, behind what is queued on
the current stream. Nothing here blocks a thread for longer than it is told: how far a transfer is,
is asked of the device. NCCL's own watchdog, which would end the process, is given a day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from m2flow.runtime.transport.announced import HOLDER, TAKER, Meeting
from m2flow.runtime.transport.groups import choose_interface

POLL_SECONDS = 50e-6
"""How long to wait before the device is asked again; longer ones follow."""

LONGEST_POLL_SECONDS = 2e-3
_WATCHDOG = timedelta(days=1)


class NcclChannels:
    """How channels of NCCL come about.

    Args:
        host: this node's address, at which other nodes reach it.
        device: this process's GPU.
    """

    def __init__(self, host: str, device: torch.device) -> None:
        self._host, self._device = host, device

    def open(self) -> tuple[Meeting, Any]:
        """A store on a free port."""
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(self._host, 0, 2, is_master=True, wait_for_workers=False)
        return Meeting(self._host, store.port), store

    def join(self, meeting: Meeting, store: Any, rank: int, seconds: float) -> NcclChannel:
        """A side's end. NCCL itself connects at the first transfer."""
        from torch._C._distributed_c10d import ProcessGroupNCCL, TCPStore

        choose_interface(self._host)
        timeout = timedelta(seconds=max(1.0, seconds))
        if store is None:
            store = TCPStore(meeting.host, meeting.port, 2, is_master=False, timeout=timeout)
        store.set_timeout(timeout)
        options = ProcessGroupNCCL.Options()
        options._timeout = _WATCHDOG
        return NcclChannel(ProcessGroupNCCL(store, rank, 2, options), self._device)

    def empty(self, nbytes: int) -> Tensor:
        """Memory to receive into."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class NcclChannel:
    """One end of a communicator of two.

    Args:
        group: a torch.distributed backend of two ranks.
        device: the GPU.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device

    def send(self, pieces: Sequence[Tensor]) -> Callable[[float], bool]:
        """Enqueue pieces for the taker."""
        with torch.cuda.device(self._device):
            return _Works([self._group.send([piece], TAKER, 0) for piece in pieces], pieces)

    def receive(self, pieces: Sequence[Tensor]) -> Callable[[float], bool]:
        """Enqueue pieces of the holder."""
        with torch.cuda.device(self._device):
            return _Works([self._group.recv([piece], HOLDER, 0) for piece in pieces], pieces)

    def abort(self) -> None:
        """Take what is enqueued off the device."""
        self._group.abort()


class _Works:
    """Waits for transfers by asking, so that a wait can end; holds their memory until then."""

    def __init__(self, works: Sequence[Any], pieces: Sequence[Tensor]) -> None:
        self._works, self._pieces = list(works), list(pieces)

    def __call__(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        pause = POLL_SECONDS
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        for work in self._works:
            work.wait()  # raises what went wrong, and orders the current stream behind it
        self._pieces.clear()
        return True
