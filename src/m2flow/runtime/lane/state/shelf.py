"""What keeps the bytes of storages while these have no memory: see `FileShelf`, `HostMemoryShelf`.

A shelf holds one list of storages at a time, and knows their bytes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import UntypedStorage


class Shelf(Protocol):
    """A place for bytes."""

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the bytes of these storages. After an error nothing is kept."""

    def settle(self) -> None:
        """The storages have been emptied: give their memory back to the system."""

    def filling(self) -> AbstractContextManager[None]:
        """Surrounds giving memory back to the storages and filling it; on leaving, it is done."""

    def grow(self, storage: UntypedStorage, num_bytes: int) -> None:
        """Give an empty storage its memory again, with anything in it; inside `filling`."""

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the bytes back into the storages they came from, inside `filling`; keeps them."""

    def clear(self) -> None:
        """Forget the bytes."""
