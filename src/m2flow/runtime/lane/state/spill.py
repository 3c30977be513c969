"""`FileShelf`: bytes in a file without a name, for state on the CPU.

The file has no name from the start, so nothing is left behind when a process dies. It is emptied
as soon as its bytes are back: state that returns soon mostly never reaches the disk, for the
system writes it out with delay. In between it is the system's file cache and not the process's
memory. A folder on a file system in memory would free nothing: the temporary folder often is one,
and is then left for one on a disk, with a warning where there is none.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from torch import UntypedStorage

from m2flow.errors import RunFailed
from m2flow.runtime.lane.state.memory import return_free_memory, use_huge_pages

_IN_MEMORY = ("tmpfs", "ramfs")
_ON_DISK = (Path("/var/tmp"), Path(os.environ.get("HOME", "/var/tmp")))
"""Where the file goes if the folder lies in memory; the first that does not."""

_log = logging.getLogger(__name__)


class FileShelf:
    """Bytes in a file without a name.

    A shelf, this one or `HostMemoryShelf`, keeps the bytes of one list of storages at a time while
    these have no memory.

    Args:
        folder: where the file lies; None for the system's temporary folder. One that lies in memory
            is replaced.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = on_disk(Path(tempfile.gettempdir()) if folder is None else folder)
        self._file: int | None = None

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the bytes of these storages. After an error nothing is kept."""
        file = self._open()
        try:
            _transfer(lambda buffer, start: os.pwrite(file, buffer, start), storages)
        except OSError as error:
            self.clear()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            num_bytes = sum(storage.nbytes() for storage in storages)
            raise RunFailed(
                f"no room to put {num_bytes} bytes of state away in {self._folder}: name another "
                "folder for it, or make room"
            ) from error
        except BaseException:
            self.clear()
            raise

    def settle(self) -> None:
        """The storages have been emptied: give their memory back to the system."""
        return_free_memory()

    def take(self, away: Sequence[tuple[UntypedStorage, int]]) -> None:
        """Give storages their memory, of so many bytes, and its content again; keeps the bytes."""
        for storage, num_bytes in away:
            storage.resize_(num_bytes)
            use_huge_pages(storage)
        file, storages = self._open(), [storage for storage, _ in away]
        _transfer(lambda buffer, start: os.preadv(file, [buffer], start), storages)

    def clear(self) -> None:
        """Forget the bytes."""
        os.ftruncate(self._open(), 0)

    def _open(self) -> int:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            self._file = file.fileno()
            weakref.finalize(self, file.close)
        return self._file


def on_disk(folder: Path) -> Path:
    """The folder, or one on a disk if it lies in memory; itself, with a warning, if all do."""
    if not _lies_in_memory(folder):
        return folder
    for other in _ON_DISK:
        if other.is_dir() and os.access(other, os.W_OK) and not _lies_in_memory(other):
            return other
    _log.warning(
        "%s lies in memory, and so does all else that can be written to: state that is put away "
        "there frees none; set TMPDIR to a folder on a disk",
        folder,
    )
    return folder


def _lies_in_memory(folder: Path) -> bool:
    """Whether the file system that a folder lies on, or will lie on, is one in memory."""
    path = folder.resolve()
    mounts = [
        one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)
    ]
    # Of mounts at one point the last hides the others.
    return sorted(mounts, key=lambda one: len(one.mountpoint))[-1].fstype in _IN_MEMORY


def _transfer(move: Callable[[memoryview, int], int], storages: Sequence[UntypedStorage]) -> None:
    """Moves all bytes, in order, from the file's start; `move` may do less than it is asked for."""
    position = 0
    for storage in storages:
        buffer = _buffer(storage)
        while buffer:
            moved = move(buffer, position)
            if moved == 0:
                raise RunFailed(f"the file with the state ends after {position} bytes")
            buffer, position = buffer[moved:], position + moved


def _buffer(storage: UntypedStorage) -> memoryview:
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(memory).cast("B")
