"""Root mean square normalisation, in few kernels for float32 and as the trainer has it elsewhere.

Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, equation 4, with
transformers' epsilon: `weight * x / sqrt(mean(x**2) + epsilon)`, the quotient at least in float32.

Legend: E normalised channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RMSNorm:
    """Normalises the last dimension, of one size, with a weight given at each call."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype, device: torch.device) -> None:
        self._epsilon = epsilon
        self._short = dtype is torch.float32
        self._weight_scale = math.sqrt(size) if self._short else 1.0
        self._floor = torch.tensor(math.sqrt(size * epsilon), device=device)

    def prepare(self, weight: Tensor) -> None:
        """Brings a model's weight into the form that the call takes, in place."""
        weight.mul_(self._weight_scale)

    def __call__(self, input_E: Tensor, weight_E: Tensor) -> Tensor:
        """`input_E`: [..., E]; `weight_E`: prepared, broadcastable to it."""
        if self._short:
            # hypot(|x|, sqrt(E epsilon)) is the denominator times sqrt(E), which the prepared
            # weight makes good: four kernels instead of seven.
            norm = torch.linalg.vector_norm(input_E, dim=-1, keepdim=True).hypot_(self._floor)
            return input_E.div(norm).mul_(weight_E)
        wide_E = input_E.to(torch.promote_types(input_E.dtype, torch.float32))
        mean_square = wide_E.pow(2).mean(-1, keepdim=True)
        normed_E = wide_E * torch.rsqrt(mean_square + self._epsilon)
        return normed_E.to(input_E.dtype).mul_(weight_E)
