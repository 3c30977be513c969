"""A GPU for tests: memory that nobody may touch as host memory, and handles that are counted."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from m2flow.runtime.transport.cuda_ipc import CudaIPC, Handle


class FakeDriver:
    """What the processes of a machine share: tensors by handle, and how often each was let go.

    Attributes:
        broken_opens: pieces that cannot be opened, by number.
        unshareable: whether nothing can be shared at all.
        shared: how many handles were made.
        finished: how many of them for another GPU.
    """

    def __init__(self) -> None:
        self.broken_opens: set[int] = set()
        self.unshareable = False
        self.shared = 0
        self.finished = 0
        self.let_go_count: dict[int, int] = {}
        self._tensors: dict[int, Tensor] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Handles whose memory still has to stay."""
        return len(self._tensors)

    def share(self, piece: Tensor, *, same_gpu: bool) -> Handle:
        if self.unshareable:
            raise RuntimeError("the allocator does not share\nand says much more")
        with self._lock:
            number = next(self._numbers)
            self._tensors[number] = piece
            self.let_go_count[number] = 0
            self.shared += 1
            self.finished += not same_gpu
        return (number,)

    def open(self, handle: Handle) -> Tensor:
        (number,) = handle
        if number in self.broken_opens:
            raise RuntimeError("invalid resource handle")
        alias = torch.from_dlpack(self._tensors[number])  # dies with its last view
        weakref.finalize(alias.untyped_storage(), self.let_go, handle)
        return alias

    def let_go(self, handle: Handle) -> None:
        (number,) = handle
        with self._lock:
            self.let_go_count[number] += 1
            self._tensors.pop(number, None)


class FakeGPU:
    """One GPU as one process sees it.

    Args:
        gpu: its name.
        driver: the machine's.
    """

    def __init__(self, gpu: str, driver: FakeDriver) -> None:
        self._storages: set[int] = set()
        self.devices = FakeIPC(gpu, driver)
        vars(self.devices).update(owns=self.owns, test_piece=self._test_piece)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def _test_piece(self, nbytes: int) -> Tensor:
        return self.put(torch.zeros(nbytes, dtype=torch.uint8))

    def put(self, tensor: Tensor) -> Tensor:
        """A copy in this GPU's memory."""
        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        copy.copy_(tensor)
        self._storages.add(copy.untyped_storage().data_ptr())
        self._kept: Sequence[Tensor] = [*getattr(self, "_kept", ()), copy]
        return copy


class FakeIPC(CudaIPC):
    """The link, with a driver that is made up."""

    def __init__(self, gpu: str, driver: FakeDriver) -> None:
        super().__init__(gpu, torch.device("cpu"))
        vars(self).update(share=driver.share, open=driver.open, let_go=driver.let_go)
