"""How values get to an accelerator while it is at something else."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for what the device is at.

    It would be waited for if the copy were made from memory that the system may move.
    """
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
