"""Root mean square norms of a float64 model in float64.

transformers computes them in float32 whatever the model's dtype. In a float64 model that rounding
is a billion times coarser than the rest: it turns the last bit of a sum into a difference that
shows, and makes two plans drift apart which otherwise would not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

OFFSET_NORMS = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")


def widen_norms(model: nn.Module) -> None:
    """Have the norms of a float64 model computed in float64; other models stay as they are.

    A norm is known by its class's name and its `variance_epsilon`: those of Qwen, Llama and
    Mistral, all of the form `weight * x / sqrt(mean(x**2) + epsilon)` (arXiv 1910.07467, eq. 4).
    Those of Gemma (`OFFSET_NORMS`) scale by `1 + weight`.
    """
    for module in model.modules():
        name = type(module).__name__
        offset = name in OFFSET_NORMS
        if offset or (name.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
            weight = module.weight
            if isinstance(weight, Tensor) and weight.dtype is torch.float64:
                module.__class__ = _widened(type(module), _offset_forward if offset else _forward)


def _widened(kind: type[nn.Module], forward: Callable[[Any, Tensor], Tensor]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": forward})


def _forward(norm: Any, hidden_states: Tensor) -> Tensor:
    scaled: Tensor = norm.weight * _normed(hidden_states, norm.variance_epsilon)
    return scaled


def _offset_forward(norm: Any, x: Tensor) -> Tensor:
    scaled: Tensor = (1.0 + norm.weight) * _normed(x, norm.eps)
    return scaled


def _normed(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
