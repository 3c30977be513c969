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
    heads, rotation, position, row_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAIRS: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_PAIRS: tl.constexpr,
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


def rotate(qkv_YSD: Tensor, rotation_PC: Tensor, position_N: Tensor) -> None:
    """Rotate queries and keys in place, as `decoder.rotate` does.

    Args:
        qkv_YSD: the last of S is not rotated.
        rotation_PC: complex64, C = D / 2.
        position_N: int64; of row n are the heads from n K on.
    """
    rows, heads, width = qkv_YSD.shape
    assert qkv_YSD.is_contiguous()
    assert rotation_PC.dtype is torch.complex64
    assert rotation_PC.is_contiguous()
    assert 2 * rotation_PC.shape[1] == width
    pairs = width // 2
    _rotate[(rows,)](
        qkv_YSD, torch.view_as_real(rotation_PC), position_N, heads * width, HEADS=heads - 1,
        KV_HEADS=rows // len(position_N), PAIRS=pairs,
        PADDED_HEADS=triton.next_power_of_2(heads - 1), PADDED_PAIRS=triton.next_power_of_2(pairs),
        num_warps=4,
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


@triton.jit
def _keep(
    heads, pages, token, head_stride, from_stride, to_stride, KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = channel < WIDTH
    found = tl.load(heads + row * from_stride + channel, mask=inside, other=0.0)
    place = tl.load(token + row // KV_HEADS) * to_stride + row % KV_HEADS * head_stride
    tl.store(pages + place + channel, found, inside)


def keep(kv_XTD: Tensor, cells_ZKW: Tensor, token_B: Tensor) -> None:
    """Write the keys and values of a step into the cells of a cache.

    Args:
        kv_XTD: T = 2, the key and the value of head x, of which row x // K has K.
        cells_ZKW: of all tokens that are kept, W = 2 D.
        token_B: int64, the cell of each row.
    """
    rows, _, width = kv_XTD.shape
    assert kv_XTD.stride()[1:] == (width, 1)
    assert cells_ZKW.stride(2) == 1
    _keep[(rows,)](
        kv_XTD, cells_ZKW, token_B, cells_ZKW.stride(1), kv_XTD.stride(0), cells_ZKW.stride(0),
        KV_HEADS=cells_ZKW.shape[1], WIDTH=2 * width, PADDED=triton.next_power_of_2(2 * width),
        num_warps=1,
    )  # fmt: skip
