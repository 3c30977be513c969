"""Context switching of tensors: out of the device's memory and back, to the bit."""

from m2flow.runtime.lane.state.memory import (
    peak_resident_bytes,
    reset_peak_resident_bytes,
    resident_bytes,
    return_free_memory,
)
from m2flow.runtime.lane.state.movable import MovableState
from m2flow.runtime.lane.state.storages import module_tensors

__all__ = [
    "MovableState",
    "module_tensors",
    "peak_resident_bytes",
    "reset_peak_resident_bytes",
    "resident_bytes",
    "return_free_memory",
]
