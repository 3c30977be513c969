"""Matrix products and norms at the sizes of decoding: the fastest that torch offers for each.

On the CPU `F.linear` calls MKL for float32, which leaves AVX-512 unused on processors that are not
Intel's. oneDNN uses it, over weights that are laid out for it beforehand (`prepacked`): large ones
are up to 2.5 times as fast by it, small ones slower. oneDNN compiles a kernel for each number of
rows, so callers round theirs with `padded_rows`.

On CUDA what stands between the products is one kernel each where Triton is installed, as it is with
torch for CUDA (`triton_steps`, `triton_sampling`); by torch's own operations it is three to six,
and a draw some forty.

Legend: N rows, I input features, O output features, E normalised channels.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m2flow.algorithms.sampling import sample_tokens
from m2flow.generation.records import SamplingParams
from m2flow.models.device import sent

_MIN_PADDED = 16
_ROW_STEP = 8
_MIN_PREPACKED = 1 << 18  # weights of a matrix; measured, crossing at 100 to 250 thousand
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)


def on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """An int64 tensor of numbers, without waiting for what the device is at."""
    return sent(torch.tensor(numbers), device)


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


@cache
def _in_triton(name: str) -> Any:
    """One of our modules in Triton; None where that is not installed."""
    try:
        return importlib.import_module(f"m2flow.generation.{name}")
    except ImportError:
        return None


def fused(like: Tensor, name: str = "triton_steps") -> Any:
    """The module of that name where it computes with such tensors, else None."""
    suits = like.is_cuda and like.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return _in_triton(name) if suits else None


def draw(
    logits_BV: Tensor, seed_B: Tensor, position_B: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """token_B and logprob_B of `sampling.sample_tokens`, with the settings of `params`."""
    temperature, top_k, top_p, min_p = params.distribution
    if temperature and not (top_k or top_p < 1 or min_p):
        sampling = fused(logits_BV, "triton_sampling")
        if sampling is not None:
            drawn: tuple[Tensor, Tensor] = sampling.draw(logits_BV, seed_B, position_B, temperature)
            return drawn
    return sample_tokens(
        logits_BV, seed_B, position_B, temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )


def add_norm(hidden_NE: Tensor, made_NE: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
    """Add `made` to `hidden` in place, and give `rms_norm` of the sum."""
    steps = fused(hidden_NE)
    if steps is not None and weight_E.dtype is hidden_NE.dtype:
        found: Tensor = steps.add_norm(hidden_NE, made_NE, weight_E, epsilon)
        return found
    hidden_NE += made_NE
    return rms_norm(hidden_NE, weight_E, epsilon)


def silu_gate(gate_up_NI: Tensor) -> Tensor:
    """`silu(gate) * up`, which lie side by side."""
    steps = fused(gate_up_NI)
    if steps is not None:
        found: Tensor = steps.silu_gate(gate_up_NI)
        return found
    gate, up = gate_up_NI.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class Rotation:
    """The rotary embedding at the positions of some rows.

    Args:
        table_PC: `architecture.rotation_table`: of each position, C = D / 2 complex numbers.
        position_N: int64, of each row.
        kv_heads: K, heads of keys and values in a row.
    """

    def __init__(self, table_PC: Tensor, position_N: Tensor, kv_heads: int) -> None:
        self._table_PC, self._position_N, self._kv_heads = table_PC, position_N, kv_heads

    @cached_property
    def _rotation_Y1C(self) -> Tensor:
        position_Y = self._position_N.repeat_interleave(self._kv_heads)
        return self._table_PC.index_select(0, position_Y).unsqueeze(1)

    def turn(self, qkv_YSD: Tensor) -> None:
        """Rotate adjacent channel pairs of queries and keys in place: one complex product each.

        Args:
            qkv_YSD: Y = N K; the last of S is a value, which is left.
        """
        steps = fused(qkv_YSD)
        if steps is not None:
            steps.rotate(qkv_YSD, self._table_PC, self._position_N)
            return
        pairs = qkv_YSD[:, :-1].unflatten(-1, (-1, 2))
        if qkv_YSD.dtype in (torch.float32, torch.float64):
            torch.view_as_complex(pairs).mul_(self._rotation_Y1C)
        else:
            rotated = torch.view_as_complex(pairs.float()).mul_(self._rotation_Y1C)
            pairs.copy_(torch.view_as_real(rotated))

    def turn_and_keep(self, qkv_YSD: Tensor, cells_ZKW: Tensor, token_B: Tensor) -> None:
        """`turn`, and write keys and values into the cells of a cache.

        Args:
            qkv_YSD: as for `turn`.
            cells_ZKW: Z tokens that are kept, W = 2 D.
            token_B: int64, the cell of each of the first B rows, which alone are kept.
        """
        steps = fused(qkv_YSD)
        if steps is not None:
            steps.rotate(qkv_YSD, self._table_PC, self._position_N, cells_ZKW, token_B)
            return
        self.turn(qkv_YSD)
        kv_XTD = qkv_YSD[: len(token_B) * self._kv_heads, -2:]
        cells_ZKW.flatten(1).index_copy_(0, token_B, kv_XTD.reshape(len(token_B), -1))
