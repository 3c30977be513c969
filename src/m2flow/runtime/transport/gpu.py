"""What a process has of the GPU that it stands on: who it is, and the links that it makes possible.

A process that stands on a GPU sees that one alone, as `cuda:0`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m2flow.runtime.transport.announced import Announced
from m2flow.runtime.transport.cuda_ipc import CudaIPC, TorchHandles
from m2flow.runtime.transport.devices import DeviceLink, Devices, Standing


def devices_here(name: str, node: str, host: str, number: int = 0) -> Devices | None:
    """The GPU of this process and its links; None where torch sees none.

    Args:
        name: what people call this process.
        node: the name of its machine.
        host: the machine's address, for other machines.
        number: which of the GPUs that it sees.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", number)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    links: dict[str, DeviceLink] = {"cuda_ipc": CudaIPC(gpu, TorchHandles(device))}
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        from m2flow.runtime.transport.nccl import NcclChannels

        channels = NcclChannels(host, device)
        links["nccl"] = Announced("nccl", Standing(name, node, gpu), channels)

    def on_device(tensor: Tensor) -> bool:
        return tensor.device == device

    return Devices(gpu, str(device), on_device, links)
