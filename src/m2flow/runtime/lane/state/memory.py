"""How much memory this process holds, how far a call raises it, and giving back what is free.

Counted is what only this process needs: anonymous memory, and its share of shared memory. Pages of
files (libraries, file cache) are not, for the system can drop them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"

WATCH_SECONDS = 0.002
"""How often a gauge looks while a call runs."""

_HUGE_PAGES_FROM = 2 << 20  # bytes: the size of one
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def resident_bytes() -> int:
    """Anonymous memory and this process's share of shared memory, resident now."""
    rollup = _PROCESS / "smaps_rollup"
    if rollup.exists():
        sizes = _sizes(rollup)
        if "Pss_Shmem" in sizes:
            return sizes["Anonymous"] + sizes["Pss_Shmem"]
    return _sizes(_PROCESS / "status")["RssAnon"]


def peak_resident_bytes() -> int:
    """The most that was resident since the start, or since `reset_peak_resident_bytes`.

    The system keeps the peak of all resident pages; those of files, as they are now, are taken off.
    So shared memory counts in full here.
    """
    sizes = _sizes(_PROCESS / "status")
    return sizes["VmHWM"] - sizes["RssFile"]


def reset_peak_resident_bytes() -> bool:
    """Begin a new peak at what is resident now; False where the system does not allow it."""
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def return_free_memory() -> None:
    """Give memory that the C library's heap keeps, though it is free, back to the system."""
    trim = getattr(_libc, "malloc_trim", None)  # glibc's; other C libraries keep less
    if trim is not None:
        trim(0)


def use_huge_pages(storage: torch.UntypedStorage) -> None:
    """Fresh memory in small pages is filled at half the speed or less. A hint: may be declined.

    Pages at both ends are meant as well, so that storages which lie side by side join up.
    """
    if storage.nbytes() < _HUGE_PAGES_FROM:
        return
    start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
    _libc.madvise(start, end - start, _MADV_HUGEPAGE)


def _sizes(file: Path) -> dict[str, int]:
    """The lines `Name: 123 kB`, in bytes."""
    sizes = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            sizes[name] = 1024 * int(number)
    return sizes


class MemoryGauge:
    """How far the memory of a lane rises while a call runs.

    On an accelerator what its allocator has handed out counts; on the CPU what is resident of the
    process. The C library's heap keeps memory that is free, in which a call would not be seen to
    rise, so that is given back first. Only where nothing else goes on in the process is it the
    call's own.

    The system's peak is of all pages, and pages of files that come in after it would be taken off
    it. So a thread looks as well, which misses only what lasts shorter than `WATCH_SECONDS`.

    Args:
        device: "cpu" or "cuda:0".
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._held: int | None = None
        self._highest = 0
        self._over = threading.Event()

    def begin(self) -> None:
        """Count from what is held now, until `end`."""
        self.end()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held = torch.cuda.memory_allocated(self._device)
            return
        return_free_memory()
        self._held = peak_resident_bytes() if reset_peak_resident_bytes() else None
        self._highest, self._over = 0, threading.Event()
        threading.Thread(target=self._watch, args=(self._over,), daemon=True).start()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(WATCH_SECONDS):
            sizes = _sizes(_PROCESS / "status")
            self._highest = max(self._highest, sizes["RssAnon"] + sizes["RssShmem"])

    def end(self) -> None:
        """Look no longer."""
        self._over.set()

    def risen(self) -> int | None:
        """Bytes of the highest level since `begin` above that at `begin`; None where the system
        does not tell."""
        self.end()
        if self._held is None:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self._held
        return max(0, self._highest - self._held, peak_resident_bytes() - self._held)
