"""Matrix products and norms at the sizes of decoding: the fastest that torch offers for each.

On the CPU `F.linear` calls MKL for float32, which leaves AVX-512 unused on processors that are not
Intel's. oneDNN uses it, over weights that are laid out for it beforehand (`prepacked`): large ones
are up to 2.5 times as fast by it, small ones slower. oneDNN compiles a kernel for each number of
rows, so callers round theirs with `padded_rows`.

Legend: N rows, I input features, O output features, E normalised channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_PADDED = 16
_ROW_STEP = 8
_MIN_PREPACKED = 1 << 18  # weights of a matrix; measured, crossing at 100 to 250 thousand
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)


def padded_rows(num_rows: int) -> int:
    """How many rows to compute for `num_rows`: few distinct numbers, and little waste.

    oneDNN takes a third of a millisecond to make a kernel for a new shape and keeps 1,024.
    """
    if num_rows < _MIN_PADDED:
        return num_rows
    step = _ROW_STEP if num_rows <= 256 else 8 * _ROW_STEP
    return -(-num_rows // step) * step


def is_prepacked(weight_OI: Tensor) -> bool:
    """Whether `prepacked` makes a copy of a weight."""
    return (
        _HAS_ONEDNN
        and weight_OI.dtype is torch.float32
        and weight_OI.device.type == "cpu"
        and weight_OI.dim() == 2
        and weight_OI.numel() >= _MIN_PREPACKED
    )


def prepacked(weight_OI: Tensor) -> Tensor:
    """A weight as `linear` is fastest with it: a copy that only `linear` can read, or itself."""
    if not is_prepacked(weight_OI):
        return weight_OI
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    return packed


def linear(input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`input @ weight.T + bias`, in the input's dtype. For inference: records no gradient."""
    if weight_OI.is_mkldnn:
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
