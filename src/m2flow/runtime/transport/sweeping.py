"""The folder of shared memory: whether it can be used, and files there that nobody will unlink."""

from __future__ import annotations

import mmap
import os
import tempfile
from glob import escape
from pathlib import Path

from m2flow.errors import UserError

FOLDER = Path("/dev/shm")


def check_shared_memory() -> None:
    """Make, fill and map a page in `FOLDER`, as lanes will.

    Raises:
        UserError: it cannot be done; says why, and what helps.
    """
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
    except OSError as error:
        raise UserError(
            f"lanes hand items over in shared memory, which cannot be written: {error.strerror}",
            key=str(FOLDER),
            expected="a tmpfs with room, writable by you",
            hint="mount it so (containers: --shm-size 8g, or --ipc host), or run --mode eager",
        ) from error


def sweep(prefix: str) -> int:
    """Unlink what pools with this prefix left in /dev/shm when they were killed; the number.

    The prefix must not belong to a pool that lives.
    """
    left = list(FOLDER.glob(f"{escape(prefix)}*"))
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)
