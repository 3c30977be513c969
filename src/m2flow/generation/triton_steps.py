"""What stands between the products of a decode step, each in one Triton kernel.

PyTorch's own operations round alike and take three to six kernels for each of these, every one of
which reads and writes all activations and takes the device some microseconds however few they are.

Imports Triton, which comes with torch for CUDA. Legend: N rows, E hidden size, I channels of a
gated layer, Y = N K heads of keys and values, S = G + 2 queries, key and value of each, D channels
of a head, P positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 1024
"""Channels of a gated layer that a program computes."""


@triton.jit
def _add_norm(
    hidden, made, weight, out, epsilon, row_stride, made_stride, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = channel < WIDTH
    at = hidden + row * row_stride + channel
    before = tl.load(at, mask=inside, other=0.0)
    more = tl.load(made + row * made_stride + channel, mask=inside, other=0.0)
    sum_ = (before.to(tl.float32) + more.to(tl.float32)).to(before.dtype)
    tl.store(at, sum_, inside)
    wide = sum_.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    normed = (wide * scale).to(before.dtype).to(tl.float32)
    by = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + channel, (normed * by).to(before.dtype), inside)


def add_norm(hidden_NE: Tensor, made_NE: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
    """Add `made` to `hidden` in place, and give what `kernels.rms_norm` makes of the sum."""
    rows, width = hidden_NE.shape
    assert hidden_NE.stride(1) == made_NE.stride(1) == 1
    out_NE = torch.empty_like(hidden_NE, memory_format=torch.contiguous_format)
    _add_norm[(rows,)](
        hidden_NE, made_NE, weight_E, out_NE, epsilon, hidden_NE.stride(0), made_NE.stride(0),
        WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return out_NE


@triton.jit
def _rotate(
    heads, rotation, position, cells, token, kept_rows, row_stride, cell_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAIRS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED_PAIRS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_PAIRS)
    channel = tl.arange(0, 2 * PADDED_PAIRS)
    angle = rotation + tl.load(position + row // KV_HEADS) * (2 * PAIRS) + 2 * pair
    cosine = tl.load(angle, mask=pair < PAIRS, other=0.0)[None, :]
    sine = tl.load(angle + 1, mask=pair < PAIRS, other=0.0)[None, :]
    at = heads + row * row_stride + head[:, None] * (2 * PAIRS) + channel[None, :]
    inside = (head < HEADS)[:, None] & (channel < 2 * PAIRS)[None, :]
    found = tl.load(at, mask=inside, other=0.0)
    x, y = tl.split(found.to(tl.float32).reshape(PADDED_HEADS, PADDED_PAIRS, 2))
    turned = tl.join(x * cosine - y * sine, x * sine + y * cosine)
    turned = turned.reshape(PADDED_HEADS, 2 * PADDED_PAIRS)
    tl.store(at, turned.to(found.dtype), inside)
    if KEPT:
        cell = tl.load(token + tl.minimum(row, kept_rows - 1) // KV_HEADS) * cell_stride
        cells += cell + row % KV_HEADS * head_stride
        key, width = (
            tl.where(row < kept_rows, HEADS - 1, HEADS),
            tl.where(row < kept_rows, 2 * PAIRS, 0),
        )
        is_key = (head == key)[:, None] & inside
        tl.store(cells + channel[None, :] + 0 * head[:, None], turned.to(found.dtype), is_key)
        value = heads + row * row_stride + HEADS * (2 * PAIRS) + channel
        is_value = channel < width
        tl.store(cells + 2 * PAIRS + channel, tl.load(value, mask=is_value, other=0.0), is_value)


def rotate(
    qkv_YSD: Tensor,
    rotation_PC: Tensor,
    position_N: Tensor,
    cells_ZKW: Tensor | None = None,
    token_B: Tensor | None = None,
) -> None:
    """Rotate queries and keys in place, as `kernels.Rotation` does, and keep keys and values.

    Args:
        qkv_YSD: the last of S is a value, which is not rotated.
        rotation_PC: complex64, C = D / 2.
        position_N: int64; of row n are the heads from n K on.
        cells_ZKW: of all tokens that are kept, W = 2 D; None where none is.
        token_B: int64, the cell of each of the first rows, which alone are kept.
    """
    rows, heads, width = qkv_YSD.shape
    assert qkv_YSD.is_contiguous()
    assert rotation_PC.dtype is torch.complex64
    assert rotation_PC.is_contiguous()
    assert 2 * rotation_PC.shape[1] == width
    pairs, kv_heads, kept = width // 2, rows // len(position_N), (qkv_YSD, position_N, 0)
    cell_stride = head_stride = 0
    if cells_ZKW is not None and token_B is not None:
        assert cells_ZKW.shape[1:] == (kv_heads, 2 * width)
        assert cells_ZKW.stride(2) == 1
        kept = (cells_ZKW, token_B, len(token_B) * kv_heads)
        cell_stride, head_stride = cells_ZKW.stride()[:2]
    _rotate[(rows,)](
        qkv_YSD, torch.view_as_real(rotation_PC), position_N, *kept, heads * width, cell_stride,
        head_stride, HEADS=heads - 1, KV_HEADS=kv_heads, PAIRS=pairs,
        PADDED_HEADS=triton.next_power_of_2(heads - 1), PADDED_PAIRS=triton.next_power_of_2(pairs),
        KEPT=cells_ZKW is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _silu_gate(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = gate_up + row * (2 * WIDTH) + channel
    gate, up = tl.load(at, mask=inside, other=0.0), tl.load(at + WIDTH, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + channel, (opened * up.to(tl.float32)).to(gate.dtype), inside)


def silu_gate(gate_up_NI: Tensor) -> Tensor:
    """`silu(gate) * up` of both side by side."""
    rows, width = gate_up_NI.shape[0], gate_up_NI.shape[1] // 2
    assert gate_up_NI.is_contiguous()
    out_NI = gate_up_NI.new_empty(rows, width)
    _silu_gate[(rows, triton.cdiv(width, _CHANNELS))](
        gate_up_NI, out_NI, WIDTH=width, BLOCK=_CHANNELS, num_warps=4
    )
    return out_NI
