"""Matrix products and norms at the sizes of decoding: the fastest that torch offers for each.

On the CPU `F.linear` calls MKL for float32, which leaves AVX-512 unused on processors that are not
Intel's; oneDNN uses it and is about twice as fast from 16 rows up. oneDNN compiles a kernel for
each number of rows, so callers round theirs with `padded_rows`.

Root mean square normalisation takes few kernels for float32, and is as the trainer has it
elsewhere: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, equation 4,
with transformers' epsilon: `weight * x / sqrt(mean(x**2) + epsilon)`, the quotient at least in
float32.

Legend: N rows, I input features, O output features, E normalised channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Below, a compiled kernel costs more to look up than it saves (measured; crossing at 8 to 16).
_ONEDNN_MIN_ROWS = 16
_ROW_STEP = 8
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)


def padded_rows(num_rows: int) -> int:
    """How many rows to compute for `num_rows`: few distinct numbers, and little waste.

    oneDNN takes a third of a millisecond to make a kernel for a new shape and keeps 1,024.
    """
    if num_rows < _ONEDNN_MIN_ROWS:
        return num_rows
    step = _ROW_STEP if num_rows <= 256 else 8 * _ROW_STEP
    return -(-num_rows // step) * step


def linear(input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`input @ weight.T + bias`, in the input's dtype. For inference: records no gradient."""
    if (
        _HAS_ONEDNN
        and input_NI.shape[0] >= _ONEDNN_MIN_ROWS
        and input_NI.dtype is torch.float32
        and input_NI.device.type == "cpu"
    ):
        return torch.ops.mkldnn._linear_pointwise(input_NI, weight_OI, bias_O, "none", [], "")
    return F.linear(input_NI, weight_OI, bias_O)


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
