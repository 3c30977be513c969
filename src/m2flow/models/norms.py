"""Root mean square norms of a float64 model in float64.

transformers computes them in float32 whatever the model's dtype. In a float64 model that rounding
is a billion times coarser than the rest: it turns the last bit of a sum into a difference that
shows, and makes two plans drift apart which otherwise would not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def widen_norms(model: nn.Module) -> None:
    """Have the norms of a float64 model computed in float64; other models stay as they are.

    A norm is known by its class's name and its `variance_epsilon`: those of Qwen, Llama and
    Mistral, all of the form `weight * x / sqrt(mean(x**2) + epsilon)` (arXiv 1910.07467, eq. 4).
    """
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            weight = module.weight
            if isinstance(weight, Tensor) and weight.dtype is torch.float64:
                module.__class__ = _widened(type(module))


def _widened(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": _forward})


def _forward(norm: Any, hidden_states: Tensor) -> Tensor:
    mean_square = hidden_states.pow(2).mean(-1, keepdim=True)
    normed = hidden_states * torch.rsqrt(mean_square + norm.variance_epsilon)
    widened: Tensor = norm.weight * normed
    return widened
