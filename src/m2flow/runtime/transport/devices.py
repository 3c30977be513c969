"""The GPU that a process runs on, and whether a payload's device part goes to another one directly.

Both sides say where they run: on which machine, and on which GPU by its UUID, because lanes see
only their own one and call it `cuda:0`. The side that answers chooses, as for host memory: CUDA
IPC between lanes of one machine, or the way through host memory (`staged`), which always exists. If
CUDA IPC turns out not to work for a pair, the asker refuses it once and remembers that.
"""

from __future__ import annotations

import torch

from m2flow.runtime.transport.cuda_ipc import CudaIPC
from m2flow.runtime.transport.peering import LinkUnavailable, Location
from m2flow.runtime.transport.table import CUDA_IPC, Scope


def devices_here(number: int = 0) -> CudaIPC | None:
    """The GPU of this process; None where torch sees none.

    Args:
        number: which of the GPUs that the process sees.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", number)
    return CudaIPC(str(torch.cuda.get_device_properties(device).uuid), device)


def scope_between(one: Location, other: Location) -> Scope | None:
    """How near two GPUs of a machine are; None where there is no direct way between the two."""
    if one.gpu is None or other.gpu is None or one.node != other.node:
        return None
    return "gpu" if one.gpu == other.gpu else "gpus"


def uses_ipc(
    asker: Location, holder: Location, *, refused: str | None, demanded: str | None = None
) -> bool:
    """Whether device memory goes by CUDA IPC; else it goes through host memory.

    Args:
        asker: who receives.
        holder: who sends.
        refused: why the asker cannot use CUDA IPC, or None.
        demanded: the one way that is wanted; a way of host memory is one too.

    Raises:
        LinkUnavailable: CUDA IPC is demanded and does not work between the two.
    """
    if demanded not in (None, CUDA_IPC):
        return False
    if scope_between(asker, holder) is not None and refused is None:
        return True
    if demanded is None:
        return False
    why = refused or "they do not run on GPUs of one machine"
    raise LinkUnavailable(
        f"there is no link {CUDA_IPC!r} from {holder.name} to {asker.name}: {why}"
    )
