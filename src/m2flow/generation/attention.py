"""Attention of a prompt's tokens, and of one new token of each running sequence.

Both take a window, beyond which nothing is seen, and a cap on scores (`cap tanh(score / cap)`,
Gemma 2, arXiv 2408.00118, section 2). Scores of a prompt are never stored for all its positions.

Legend: U prompts, P asking positions, T answering ones (0 to T - 1; the last asking is T - 1),
H query heads, K key-value heads, G = H / K, D channels of a head, Q asking positions of a block;
X heads of all running rows, C columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 256
"""Positions that ask together, where scores or a mask must be stored."""


def prompt_attention(
    query_UHPD: Tensor,
    key_UKTD: Tensor,
    value_UKTD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """What the last P of T positions make of themselves and of those before, [U, H, P, D]."""
    asking, answering = query_UHPD.shape[2], key_UKTD.shape[2]
    first = answering - asking
    gqa = query_UHPD.shape[1] != key_UKTD.shape[1]
    if window is not None and window >= answering:
        window = None
    if first == 0 and window is None and cap is None:
        return F.scaled_dot_product_attention(
            query_UHPD, key_UKTD, value_UKTD, is_causal=True, scale=scale, enable_gqa=gqa
        )
    out_UHPD = torch.empty_like(query_UHPD)
    for start in range(0, asking, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, asking)
        # Blocks of keys that no position of the block sees are left out.
        begin = 0 if window is None else max(0, first + start - window + 1)
        position_Q1 = torch.arange(first + start, first + end, device=query_UHPD.device)[:, None]
        position_T = torch.arange(begin, first + end, device=query_UHPD.device)
        seen_QT = position_T <= position_Q1
        if window is not None:
            seen_QT &= position_T > position_Q1 - window
        block, keys = slice(start, end), slice(begin, first + end)
        asked = query_UHPD[:, :, block], key_UKTD[:, :, keys], value_UKTD[:, :, keys]
        if cap is None:
            out_UHPD[:, :, block] = F.scaled_dot_product_attention(
                *asked, attn_mask=seen_QT, scale=scale, enable_gqa=gqa
            )
        else:
            out_UHPD[:, :, block] = _capped(*asked, seen_QT, scale, cap)
    return out_UHPD


def _capped(
    query_UHQD: Tensor,
    key_UKTD: Tensor,
    value_UKTD: Tensor,
    seen_QT: Tensor,
    scale: float,
    cap: float,
) -> Tensor:
    kv_heads = key_UKTD.shape[1]
    query_UKGQD = query_UHQD.unflatten(1, (kv_heads, -1))
    key_UK1DT = key_UKTD.unsqueeze(2).transpose(-1, -2)
    score_UKGQT = capped((query_UKGQD @ key_UK1DT).mul_(scale), cap)
    share_UKGQT = _softmax(score_UKGQT.masked_fill_(~seen_QT, -torch.inf))
    return (share_UKGQT @ value_UKTD.unsqueeze(2)).flatten(1, 2)


def decode_attention(
    query_XGD: Tensor,
    key_XCD: Tensor,
    value_XCD: Tensor,
    mask_X1C: Tensor,
    *,
    scale: float,
    cap: float | None,
    out_XGD: Tensor,
) -> None:
    """Writes what each row's new token makes of the columns that the mask (0, -inf) shows it."""
    plain = key_XCD.device.type == "cpu" and key_XCD.dtype in (torch.float32, torch.float64)
    if cap is not None:
        score_XGC = capped(torch.bmm(query_XGD, key_XCD.transpose(1, 2)).mul_(scale), cap)
        torch.bmm(_softmax(score_XGC.add_(mask_X1C)), value_XCD, out=out_XGD)
    # bmm beats the fused kernel for float32 and float64 on the CPU; elsewhere the fused kernel
    # is faster, and for half precision it keeps the scores in float32.
    elif plain:
        score_XGC = torch.baddbmm(mask_X1C, query_XGD, key_XCD.transpose(1, 2), alpha=scale)
        torch.bmm(score_XGC.softmax(dim=-1), value_XCD, out=out_XGD)
    else:
        # A head of a row stands where the kernel has the batch, and its group of queries where
        # the kernel has positions.
        out_XGD[:] = F.scaled_dot_product_attention(
            query_XGD.unsqueeze(1),
            key_XCD.unsqueeze(1),
            value_XCD.unsqueeze(1),
            attn_mask=mask_X1C.unsqueeze(1),
            scale=scale,
        ).squeeze(1)


def capped(score: Tensor, cap: float | None) -> Tensor:
    """`cap tanh(score / cap)`, in place; `score` itself without a cap."""
    return score if cap is None else score.div_(cap).tanh_().mul_(cap)


def _softmax(score: Tensor) -> Tensor:
    """Over the last dimension, in float32 at least, as transformers has it."""
    return score.softmax(-1, torch.promote_types(score.dtype, torch.float32)).to(score.dtype)
