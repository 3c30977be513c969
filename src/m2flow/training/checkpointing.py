"""Activations that are computed again in the backward pass, block by block.

Only the input of each block stays in memory between the passes (Chen et al., "Training Deep Nets
with Sublinear Memory Cost", arXiv 1604.06174), for a third more arithmetic.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from m2flow.errors import UserError


def checkpoint_blocks(model: nn.Module) -> None:
    """Compute the blocks of a transformers model again in each backward pass.

    transformers does so in training mode alone, in which blocks may drop out what they compute. So
    each block gets a forward of its own, and stays in the mode that it is in. Random states are not
    kept: the model is in evaluation mode, where nothing in a block draws.

    Raises:
        UserError: the model has no blocks that transformers can compute again.
    """
    blocks: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not blocks:
        raise UserError(
            "this model's activations cannot be computed again in the backward pass",
            key="training.gradient_checkpointing",
            value=type(model).__name__,
            expected="a transformers model of repeated blocks, or false",
        )
    for block in blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
