"""What every thread of a lane does, written on a signal: also where the lane is stuck in a call.

A signal whose handler runs in C needs no thread of the lane to come back to Python. `STACKS` in the
pool's folder holds what was written, one dump after the other.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR2
STACKS = "stacks-{}"
"""Name of the file of the lane in a position; while it is there, the lane hears the signal."""


def listen(folder: Path, position: int) -> None:
    """Write the stacks of this process whenever `SIGNAL` comes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    file = os.open(folder / STACKS.format(position), flags, 0o600)
    faulthandler.register(SIGNAL, file=file, all_threads=True)
