"""Weights in memory of their own, and not in pages of the file they were read from.

Where a tensor begins in a file depends on all names before it, so that the same weights lie at
other addresses in a copy of the file. Kernels choose their order of summation by alignment too: a
run that went on from a checkpoint would differ in the last bit from one that was never stopped.
"""

from __future__ import annotations

from torch import nn


def take_over(model: nn.Module) -> None:
    """Copy each parameter, one at a time, into memory that the allocator has aligned."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
