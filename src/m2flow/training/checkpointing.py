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

    transformers does so in training mode alone, which turns dropout on too. So the blocks
    themselves are set to training mode and nothing within them is. To be called after the last
    `model.eval()`. Random states are not kept, since nothing in a block draws.

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
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = _COMPUTED_AGAIN
        block.training = True


_COMPUTED_AGAIN = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
