"""What every thread of a lane does, written on a signal: also where the lane is stuck in a call.

A signal whose handler runs in C needs no thread of the lane to come back to Python. `STACKS` in the
pool's folder holds what was written, one dump after the other.
"""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR2
STACKS = "stacks-{}"
"""Name of the file of the lane in a position; while it is there, the lane hears the signal."""


def listen(folder: Path, position: int) -> None:
    """Write the stacks of this process whenever `SIGNAL` comes."""
    file = (folder / STACKS.format(position)).open("w")
    faulthandler.register(SIGNAL, file=file, all_threads=True)
