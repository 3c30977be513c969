"""`PageReader` in Triton, for a torch whose own kernel cannot follow tables of pages (before 2.13).

A program reads the keys and values that one key-value head of one sequence has, or one part of
them, each once for all query heads of the group, with the softmax in running form (Milakov and
Gimelshein, arXiv 1805.02867). Where sequences and heads are too few to fill the device each
sequence is read in parts, which are then joined (Flash-Decoding: Dao et al., 2023). What teams of
sequences have in common is read first, in parts too, each once for a whole team; each sequence goes
on from what that has given.

Imports Triton, which comes with torch for CUDA. Legend as in `paged_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2flow.generation.shared_prefix import BLOCK, TEAM, SharedPrefixes

_LEAST_PART = 256
"""Tokens of a part at least: shorter ones cost more to join than they gain."""

_LEAST_SIDE = 16
"""Query heads of a program and channels of a head: the least that tensor cores multiply."""

_PROGRAMS = 3
"""Of each multiprocessor: with fewer, sequences are read in parts."""

_MOST_PARTS = 16
"""Of what a team has in common."""

_WIDEST_GROUP = 8
"""Query heads of a key-value head: a team's queries are then 128 lines, which registers hold."""


@triton.jit
def _attend_together(
    query,
    key,
    value,
    table,
    teams,
    made,
    highest,
    total,
    scale,
    cap,
    query_stride,
    group_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    CAPPED: tl.constexpr,
    TEAM: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    team, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    teams += team * (1 + TEAM)
    tokens, leader = tl.load(teams), tl.load(teams + 1).to(tl.int64)
    part_tokens = tl.cdiv(tl.cdiv(tokens, PARTS), BLOCK) * BLOCK
    begin, end = part * part_tokens, tl.minimum((part + 1) * part_tokens, tokens)
    line, channel, token = (
        tl.arange(0, TEAM * PADDED_GROUP),
        tl.arange(0, PADDED),
        tl.arange(0, BLOCK),
    )
    of_group, is_channel = line % PADDED_GROUP, channel < WIDTH
    row = tl.load(teams + 1 + line // PADDED_GROUP)
    is_line = (row >= 0) & (of_group < GROUP)
    row = tl.maximum(row, 0).to(tl.int64)
    is_asked = is_line[:, None] & is_channel[None, :]
    asked = (row * query_stride + head * group_stride + of_group * WIDTH)[:, None] + channel[
        None, :
    ]
    q = tl.load(query + asked, mask=is_asked, other=0.0)
    top = tl.full([TEAM * PADDED_GROUP], float("-inf"), tl.float32)
    under = tl.zeros([TEAM * PADDED_GROUP], tl.float32)
    some = tl.zeros([TEAM * PADDED_GROUP, PADDED], tl.float32)
    table += leader * table_stride
    for start in range(begin, end, BLOCK):  # whole blocks alone: every token is seen by all
        page = tl.load(table + start // PAGE).to(tl.int64)
        place = page * page_stride + (start % PAGE + token)[:, None] * token_stride
        place += head * head_stride + channel[None, :]
        k = tl.load(key + place, mask=is_channel[None, :], other=0.0)
        v = tl.load(value + place, mask=is_channel[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        if CAPPED:
            score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)
        above = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - above[:, None])
        kept = tl.exp(top - above)
        under = under * kept + tl.sum(weight, 1)
        some = some * kept[:, None] + tl.dot(weight.to(v.dtype), v)
        top = above
    at = (row * heads + head * GROUP + of_group) * PARTS + part
    tl.store(highest + at, top, is_line)
    tl.store(total + at, under, is_line)
    tl.store(made + at[:, None] * WIDTH + channel[None, :], some, is_asked)


@triton.jit
def _attend(
    query,
    key,
    value,
    table,
    lengths,
    out,
    highest,
    total,
    shared_tokens,
    shared_made,
    shared_highest,
    shared_total,
    scale,
    cap,
    part_tokens,
    query_stride,
    group_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
):
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    length = tl.load(lengths + sequence)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    known = 0  # first tokens, of which there is a result already
    if SHARED_PARTS > 0:
        known = tl.load(shared_tokens + sequence)
    begin = tl.maximum(known + part * part_tokens, first // BLOCK * BLOCK)
    end = tl.minimum(known + (part + 1) * part_tokens, length)
    row, channel, token = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, BLOCK)
    is_row, is_channel = row < GROUP, channel < WIDTH
    asked = row[:, None] * WIDTH + channel[None, :]
    is_asked = is_row[:, None] & is_channel[None, :]
    query += sequence * query_stride + head * group_stride
    q = tl.load(query + asked, mask=is_asked, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    under = tl.zeros([ROWS], tl.float32)
    made = tl.zeros([ROWS, PADDED], tl.float32)
    if SHARED_PARTS > 0:
        is_known = row < tl.where((known > 0) & (part == 0), GROUP, 0)
        is_made = is_known[:, None] & is_channel[None, :]
        for number in tl.static_range(SHARED_PARTS):  # unrolled, so that all are loaded at once
            at = (sequence * heads + head * GROUP + row) * SHARED_PARTS + number
            at_made = at[:, None] * WIDTH + channel[None, :]
            made_there = tl.load(shared_made + at_made, mask=is_made, other=0.0)
            highest_there = tl.load(shared_highest + at, mask=is_known, other=float("-inf"))
            total_there = tl.load(shared_total + at, mask=is_known, other=0.0)
            above = tl.maximum(top, highest_there)
            level = tl.where(above == float("-inf"), 0.0, above)
            kept, weight_there = tl.exp(top - level), tl.exp(highest_there - level)
            under = under * kept + weight_there * total_there
            made = made * kept[:, None] + weight_there[:, None] * made_there
            top = above
    table += sequence.to(tl.int64) * table_stride
    for start in range(begin, end, BLOCK):
        page = tl.load(table + start // PAGE).to(tl.int64)
        seen = (start + token >= first) & (start + token < end)
        place = page * page_stride + (start % PAGE + token)[:, None] * token_stride
        place += head * head_stride + channel[None, :]
        is_there = seen[:, None] & is_channel[None, :]
        k = tl.load(key + place, mask=is_there, other=0.0)
        v = tl.load(value + place, mask=is_there, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        if CAPPED:
            score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)
        score = tl.where(seen[None, :], score, float("-inf"))
        above = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - above[:, None])
        kept = tl.exp(top - above)
        under = under * kept + tl.sum(weight, 1)
        made = made * kept[:, None] + tl.dot(weight.to(v.dtype), v)
        top = above
    if PARTS == 1:
        made /= under[:, None]
        out += (sequence * heads + head * GROUP) * WIDTH
        tl.store(out + asked, made.to(out.dtype.element_ty), is_asked)
    else:
        at = (sequence * heads + head * GROUP + row) * PARTS + part
        tl.store(highest + at, top, is_row)
        tl.store(total + at, under, is_row)
        tl.store(out + at[:, None] * WIDTH + channel[None, :], made, is_asked)


@triton.jit
def _join(
    made, highest, total, out, WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    row, part, channel = tl.program_id(0), tl.arange(0, PADDED_PARTS), tl.arange(0, PADDED)
    at, is_part, is_channel = row * PARTS + part, part < PARTS, channel < WIDTH
    top = tl.load(highest + at, mask=is_part, other=float("-inf"))
    weight = tl.exp(top - tl.max(top, 0))  # 0 for a part that has no token to see
    under = tl.sum(weight * tl.load(total + at, mask=is_part, other=0.0), 0)
    place = at[:, None] * WIDTH + channel[None, :]
    some = tl.load(made + place, mask=is_part[:, None] & is_channel[None, :], other=0.0)
    joined = tl.sum(weight[:, None] * some, 0) / under
    tl.store(out + row * WIDTH + channel, joined.to(out.dtype.element_ty), is_channel)


def parts_of(programs: int, longest: int, multiprocessors: int) -> int:
    """In how many parts each sequence is read, where so many programs read a whole one."""
    wanted = -(-_PROGRAMS * multiprocessors // programs)
    return max(1, min(wanted, longest // _LEAST_PART))


def shared_parts_of(programs: int, multiprocessors: int) -> int:
    """In how many parts what a team has in common is read, where so many programs read it whole: a
    power of 2, so that few kernels are compiled."""
    wanted = max(1, multiprocessors // programs)
    return min(_MOST_PARTS, 1 << (wanted.bit_length() - 1))


def attend(
    query_BKGD: Tensor,
    key_PSKD: Tensor,
    value_PSKD: Tensor,
    table_BM: Tensor,
    length_B: Tensor,
    *,
    longest: int,
    scale: float,
    window: int | None,
    cap: float | None,
    shared: SharedPrefixes | None = None,
    out_BKGD: Tensor,
) -> None:
    """Attend over pages; see `PageReader`."""
    sequences, kv_heads, group, width = query_BKGD.shape
    heads, page, device = kv_heads * group, key_PSKD.shape[1], query_BKGD.device
    assert query_BKGD.stride()[2:] == (width, 1)
    assert out_BKGD.is_contiguous()
    assert key_PSKD.stride() == value_PSKD.stride()
    assert key_PSKD.stride(3) == table_BM.stride(1) == 1
    assert page % BLOCK == 0
    parts = parts_of(sequences * kv_heads, longest, _multiprocessors(device))
    if parts > 1:
        made = torch.empty(sequences, heads, parts, width, device=device)
        highest, total = torch.empty(2, sequences, heads, parts, device=device)
    else:
        made = highest = total = out_BKGD
    padded = max(_LEAST_SIDE, triton.next_power_of_2(width))
    part_tokens = -(-longest // (parts * BLOCK)) * BLOCK
    strides = *query_BKGD.stride()[:2], *key_PSKD.stride()[:3], table_BM.stride(0)
    limit, capped, padded_group = cap or 1.0, cap is not None, triton.next_power_of_2(group)
    known = (length_B, made, highest, total)
    shared_parts = 0
    if shared is not None and padded_group <= _WIDEST_GROUP:
        assert window is None
        shared_parts = shared_parts_of(len(shared.teams_TA) * kv_heads, _multiprocessors(device))
        some = torch.empty(sequences, heads, shared_parts, width, device=device)
        known = (shared.tokens_B, some, *torch.empty(2, *some.shape[:3], device=device))
        _attend_together[(len(shared.teams_TA), kv_heads, shared_parts)](
            query_BKGD, key_PSKD, value_PSKD, table_BM, shared.teams_TA, *known[1:], scale, limit,
            *strides, CAPPED=capped, TEAM=TEAM, GROUP=group, PADDED_GROUP=padded_group,
            WIDTH=width, PADDED=padded, PAGE=page, BLOCK=BLOCK, PARTS=shared_parts,
            num_warps=8, num_stages=2,
        )  # fmt: skip
    _attend[(sequences, kv_heads, parts)](
        query_BKGD, key_PSKD, value_PSKD, table_BM, length_B, made, highest, total, *known,
        scale, limit, part_tokens, *strides, WINDOW=window or 0, CAPPED=capped, GROUP=group,
        ROWS=max(_LEAST_SIDE, padded_group), WIDTH=width, PADDED=padded, PAGE=page, BLOCK=BLOCK,
        PARTS=parts, SHARED_PARTS=shared_parts, num_warps=4, num_stages=3,
    )  # fmt: skip
    if parts > 1:
        _join[(sequences * heads,)](
            made, highest, total, out_BKGD, WIDTH=width, PADDED=padded, PARTS=parts,
            PADDED_PARTS=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
