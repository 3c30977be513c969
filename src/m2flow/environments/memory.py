"""Observations of all environments in one piece of memory that processes share.

The memory has no name: it is a file descriptor, made before the processes that inherit it and sized
when the spec is known. It is gone with the last process that holds it, however that one ends.
"""

from __future__ import annotations

import math
import mmap
import os

import numpy as np

from m2flow.environments.environment import Array
from m2flow.environments.spec import EnvironmentSpec

ALIGNMENT = 4096
"""Rows of one part begin on a page: processes that write next to each other share no cache line."""


class ObservationMemory:
    """Arrays [num_envs, ...] by the names of the spec's observations, and one of progress.

    Args:
        spec: of all environments.
        num_processes: how many processes write.
        descriptor: of the memory.
    """

    def __init__(self, spec: EnvironmentSpec, num_processes: int, descriptor: int) -> None:
        sizes = [spec.num_envs * part.nbytes for part in spec.observations]
        ends = np.cumsum([_aligned(size) for size in (8 * num_processes, *sizes)])
        if os.fstat(descriptor).st_size < ends[-1]:
            os.ftruncate(descriptor, int(ends[-1]))
        # Arrays hold the map, and the map holds the memory: closing the descriptor harms neither.
        whole = mmap.mmap(descriptor, int(ends[-1]))
        self.progress: Array = np.frombuffer(whole, np.int64, num_processes)
        self.rows: dict[str, Array] = {}
        for part, begin in zip(spec.observations, ends[:-1], strict=True):
            count = spec.num_envs * math.prod(part.shape)
            flat = np.frombuffer(whole, part.dtype, count, int(begin))
            self.rows[part.name] = flat.reshape(spec.num_envs, *part.shape)


def anonymous_memory() -> int:
    """A descriptor of memory of no size yet, to be closed by who asked for it."""
    return os.memfd_create("m2flow-observations", os.MFD_CLOEXEC)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
