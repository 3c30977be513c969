"""What is sent when weights are published between any two layouts.

Functions of tensors and layouts alone: how anything travels is not known here. The whole way is in
docs/explanation/weights.md.
"""

from __future__ import annotations

from m2flow.runtime.weights.assemble import Assembler
from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.layout import (
    Held,
    Layout,
    LayoutError,
    Shard,
    describe,
    local_tensor,
    merged,
    wanted_boxes,
)
from m2flow.runtime.weights.swap import WeightsDoNotFit, copy_parameters, swap_parameters
from m2flow.runtime.weights.transfers import Transfer, transfers

__all__ = [
    "Assembler",
    "Box",
    "Held",
    "Layout",
    "LayoutError",
    "Shard",
    "Transfer",
    "WeightsDoNotFit",
    "copy_parameters",
    "describe",
    "local_tensor",
    "merged",
    "swap_parameters",
    "transfers",
    "wanted_boxes",
]
