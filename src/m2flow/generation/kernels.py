"""Matrix products and norms at the sizes of decoding: the fastest that torch offers for each.

On the CPU `F.linear` calls MKL for float32, which leaves AVX-512 unused on processors that are not
Intel's; oneDNN uses it, and lays the weights out anew in each call. With large weights it is up to
twice as fast from 16 rows up (AMD with AVX-512, by generation), with small ones slower. oneDNN
compiles a kernel for each number of rows, so callers round theirs with `padded_rows`.

Legend: N rows, I input features, O output features, E normalised channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Below, a compiled kernel costs more to look up than it saves (measured; crossing at 8 to 16).
_ONEDNN_MIN_ROWS = 16
_ONEDNN_MIN_WEIGHTS = 1 << 18  # measured; crossing at 100 to 400 thousand
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
        and weight_OI.numel() >= _ONEDNN_MIN_WEIGHTS
        and input_NI.dtype is torch.float32
        and input_NI.device.type == "cpu"
    ):
        return torch.ops.mkldnn._linear_pointwise(input_NI, weight_OI, bias_O, "none", [], "")
    return F.linear(input_NI, weight_OI, bias_O)


def rms_norm(input_E: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
    """`weight * x / sqrt(mean(x**2) + epsilon)` over the last dimension (arXiv 1910.07467, eq. 4).

    As transformers has it, the quotient is rounded to the input's dtype before it is scaled; or,
    where the weight's dtype is wider, computed and scaled in that and then rounded.

    Args:
        input_E: [..., E].
        weight_E: broadcastable to it.
        epsilon: as in the model's configuration.
    """
    if weight_E.dtype is not input_E.dtype:
        wide_E = F.rms_norm(input_E.to(weight_E.dtype), input_E.shape[-1:], None, epsilon)
        return wide_E.mul_(weight_E).to(input_E.dtype)
    return F.rms_norm(input_E, input_E.shape[-1:], None, epsilon).mul_(weight_E)
