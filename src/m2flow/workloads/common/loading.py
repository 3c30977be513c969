"""Lanes of one machine that load models take turns, where each has a copy for a while."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from m2flow.flow import Place


class LoadedModel(Protocol):
    """What a worker loads: where its model comes from."""

    def is_copied(self, device: str) -> bool:
        """Whether a model takes host memory of its own as it is loaded for a device.

        Pages of files are shared by all processes of a machine.
        """


@contextmanager
def in_turn(place: Place, source: LoadedModel) -> Iterator[None]:
    """Within, no other lane of this machine has a copy of a model on its way to where it stays.

    Lanes wait for each other only where loading makes copies. Nothing within may be collective, and
    what was loaded there must be on the device, in shards or in an engine at the end.

    Args:
        place: where the worker stands.
        source: where its model comes from.
    """
    from m2flow.runtime.lane.state import return_free_memory
    from m2flow.runtime.transport.sweeping import own_folder

    if place.spill is None or not source.is_copied(place.device):
        yield
        return
    own_folder(place.spill)
    folder = os.open(place.spill, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # the system gives it back for a process that is killed
        yield
        return_free_memory()
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # also where a process that was forked within has it
        os.close(folder)
