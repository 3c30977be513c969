"""`MovableState`: the tensors of a worker, which can leave the device's memory and come back.

The storages are emptied in place and filled again, so every reference to them stays good: tied
parameters, views of a flat buffer, an optimizer's states, the shards of a DTensor. What comes back
equals what left to the bit. On an accelerator the bytes wait in pinned host memory, on the CPU in a
file; those of a storage that is all zeros, such as gradients between two steps, wait nowhere.
Between `offload` and `onload` the tensors must not be touched: they have no memory. One thread
moves a state; others may compute meanwhile with other state. Knows nothing of workers, plans or
what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

from m2flow.flow.worker import Place
from m2flow.runtime.lane.state.host_memory import HostMemoryShelf
from m2flow.runtime.lane.state.spill import FileShelf
from m2flow.runtime.lane.state.storages import (
    as_bytes,
    blank_storages,
    movable_storages,
    storages_of,
)

_Away = list[tuple[UntypedStorage, int]]
"""Storages that were emptied, with their bytes."""


class MovableState:
    """State that `offload` puts away and `onload` brings back.

    Args:
        tensors: gives every tensor of the state, each time it is asked: plain tensors, parameters
            or DTensors. Those that are not on the place's kind of device stay where they are.
        place: its `device` says where the tensors live, and `spill` where the CPU's file goes.
        frozen: nobody ever changes them. They are then put away once: the bytes stay there while
            the state is resident, and the next `offload` only gives memory back.
        to_come: gives the bytes by which the state will yet grow, as far as is known: pinned memory
            is made for these too when it leaves, so that no step waits for it.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        place: Place,
        *,
        frozen: bool = False,
        to_come: Callable[[], int] = lambda: 0,
    ) -> None:
        self._tensors, self._frozen = tensors, frozen
        self._kept: _Away | None = None
        self._blank: _Away = []
        self._device = torch.device(place.device)
        self._shelf: FileShelf | HostMemoryShelf
        if self._device.type == "cpu":
            self._shelf = FileShelf(place.spill)
        else:
            self._shelf = HostMemoryShelf(self._device, to_come)
        self._away: _Away | None = None

    @property
    def is_resident(self) -> bool:
        """Whether the tensors have their memory."""
        return self._away is None

    def nbytes(self) -> int:
        """Bytes on the device: now, or where the state is away, before it left."""
        if self._away is not None:
            return sum(num_bytes for _, num_bytes in [*self._away, *self._blank])
        storages = storages_of(self._tensors(), self._device.type)
        return sum(storage.nbytes() for storage in storages)

    def offload(self) -> None:
        """Put the state away and give its memory back; nothing happens where it is away already.

        A storage that cannot be emptied in place (its memory belongs to numpy, or to the reader of
        a weight file) is replaced by one that can, once, in all tensors of the state.

        Raises:
            RunFailed: there is no room to put it, or a storage is shared with other processes, or a
                shard with another library. The state is resident and good, as after any other
                error.
        """
        if self._away is not None:
            return
        away = self._kept or self._put()
        self._empty([*away, *self._blank])
        self._away = away
        self._shelf.settle()

    def _put(self) -> _Away:
        storages = movable_storages(self._tensors(), self._device.type)
        sized = [(storage, storage.nbytes()) for storage in storages]
        blank = blank_storages(storages)
        away = [one for one, is_blank in zip(sized, blank, strict=True) if not is_blank]
        self._shelf.put([storage for storage, _ in away])
        self._blank = [one for one, is_blank in zip(sized, blank, strict=True) if is_blank]
        return away

    def _empty(self, away: _Away) -> None:
        for storage, _ in away:
            storage.resize_(0)

    def onload(self) -> None:
        """Bring the state back; nothing happens where it is resident.

        Raises:
            Exception: memory ran out, or the bytes could not be read. The state is still away, and
                `onload` may be tried again.
        """
        if self._away is None:
            return
        try:
            self._shelf.take(self._away)
            for storage, num_bytes in self._blank:
                storage.resize_(num_bytes)
                as_bytes(storage).zero_()
        except BaseException:
            self._empty([*self._away, *self._blank])
            raise
        self._kept = self._away if self._frozen else None
        self._away = None
        if not self._frozen:
            self._shelf.clear()

    @contextmanager
    def present(self) -> Iterator[None]:
        """The state is resident inside, and afterwards where it was before.

        For what happens to a worker outside its stages, such as writing a checkpoint.
        """
        was_resident = self.is_resident
        self.onload()
        try:
            yield
        finally:
            if not was_resident:
                self.offload()
