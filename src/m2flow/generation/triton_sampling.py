"""`sampling.sample_tokens` without filters in one Triton kernel.

By PyTorch's operations a draw from 256 rows of 152,064 logits writes and reads 2 GB in float64, and
takes a fifth of a decode step of a 1.5B model on an H200. Here a program has a row: it reads the
logits twice and writes a token. Sums are in float64, block by block in order, so what a row draws
depends on nothing but the row.

Imports Triton, which comes with torch for CUDA. Legend: B batch, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Logits that a program reads at a time."""


@triton.jit
def _uniform(seed, position):
    """`sampling.uniform`, by unsigned arithmetic."""
    state = seed.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * tl.full(
        [], 0x9E3779B97F4A7C15, tl.uint64
    )
    state = (state ^ (state >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _sample(
    logits, seeds, positions, tokens, logprobs, sums, row_stride,
    INVERSE: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base, scratch = logits + row * row_stride, sums + row * BLOCKS
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(BLOCKS):
        at = block * BLOCK + column
        some = tl.load(base + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
        # A comparison with NaN is false: so it stays, and makes the sum NaN.
        highest = tl.where(highest >= some, highest, some)
    top = tl.max(highest, 0).to(tl.float64)
    inverse = tl.full([], INVERSE, tl.float64)
    for block in range(BLOCKS):
        at = block * BLOCK + column
        some = tl.load(base + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float64)
        tl.store(scratch + block, tl.sum(tl.exp((some - top) * inverse), 0))
    tl.debug_barrier()
    number = tl.arange(0, PADDED_BLOCKS)
    sum_of = tl.load(scratch + number, mask=number < BLOCKS, other=0.0)
    up_to = tl.cumsum(sum_of, 0)
    total = tl.sum(sum_of, 0)
    wanted = _uniform(tl.load(seeds + row), tl.load(positions + row)) * total
    last = tl.max(tl.where(sum_of > 0, number, 0), 0)
    block = tl.minimum(tl.sum((up_to <= wanted).to(tl.int32), 0), last)
    wanted -= tl.sum(tl.where(number < block, sum_of, 0.0), 0)
    at = block * BLOCK + column
    some = tl.load(base + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float64)
    share = tl.exp((some - top) * inverse)
    last = tl.max(tl.where(share > 0, column, 0), 0)
    chosen = tl.minimum(tl.sum((tl.cumsum(share, 0) <= wanted).to(tl.int32), 0), last)
    logit = tl.load(base + block * BLOCK + chosen).to(tl.float64)
    tl.store(tokens + row, (block * BLOCK + chosen).to(tl.int64))
    tl.store(logprobs + row, ((logit - top) * inverse - tl.log(total)).to(tl.float32))


def draw(
    logits_BV: Tensor, seed_B: Tensor, position_B: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """token_B, int64, and logprob_B, float32; arguments as of `sampling.sample_tokens`.

    Logits have at most 32 bits, and the temperature is not 0.
    """
    rows, vocabulary = logits_BV.shape
    assert logits_BV.stride(1) == 1
    assert logits_BV.dtype is not torch.float64
    blocks = triton.cdiv(vocabulary, _BLOCK)
    token_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprob_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=logits_BV.device)
    _sample[(rows,)](
        logits_BV, seed_B.contiguous(), position_B.contiguous(), token_B, logprob_B, sums,
        logits_BV.stride(0),
        INVERSE=1.0 / temperature, VOCABULARY=vocabulary, BLOCK=_BLOCK, BLOCKS=blocks,
        PADDED_BLOCKS=triton.next_power_of_2(blocks), num_warps=16,
    )  # fmt: skip
    return token_B, logprob_B
