"""Attention of a new token of each sequence over pages of keys and values: torch's own kernel.

The kernel (FlashAttention, on CUDA, torch 2.13) follows each sequence's row in a table of pages. It
reads the tokens that a sequence has, and none that a longer one beside it would need.

Legend: B sequences, M pages of a sequence at most, P pages in all, S tokens of a page, H query
heads, K key-value heads, D channels of a head.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from m2flow.generation.architecture import Architecture

PAGE = 256
"""Tokens of a page: the kernel wants a multiple of it."""

WIDEST = 256
"""Largest head dimension of the kernel."""


class PageReader(Protocol):
    """Attends over pages."""

    def __call__(
        self,
        query_BHD: Tensor,
        key_PSKD: Tensor,
        value_PSKD: Tensor,
        table_BM: Tensor,
        length_B: Tensor,
        *,
        longest: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend with the last token of each sequence.

        Args:
            query_BHD: of the last tokens; head h reads key-value head h // (H / K).
            key_PSKD, value_PSKD: the pages of all sequences.
            table_BM: int32, the pages of each sequence in order.
            length_B: int32, tokens of each sequence, the last one included.
            longest: no sequence is longer; a number of the host, which does not look at `length_B`.
            scale: of the scores.
            window: tokens that are seen, the last one included; None for all.

        Returns:
            [B, H, D].
        """


@cache
def _kernel() -> Any:
    """torch's function, or None where torch is older than its tables of pages."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


def reason_against(a: Architecture, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why keys and values are not kept in pages; None where they are."""
    if device.type != "cuda":
        return "the kernel runs on CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel computes in bfloat16 or float16, not {dtype}"
    if a.score_cap is not None:
        return "the kernel does not cap scores"
    if a.head_dim > WIDEST:
        return f"the kernel's heads have at most {WIDEST} channels"
    return None if _kernel() is not None else "the kernel wants torch 2.13 or newer"


def attend(
    query_BHD: Tensor,
    key_PSKD: Tensor,
    value_PSKD: Tensor,
    table_BM: Tensor,
    length_B: Tensor,
    *,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend by torch's kernel; see `PageReader`."""
    starts = torch.arange(len(query_BHD) + 1, dtype=torch.int32, device=query_BHD.device)
    out_BHD: Tensor = _kernel()(
        query_BHD,
        key_PSKD,
        value_PSKD,
        starts,
        None,
        1,
        longest,
        scale=scale,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        enable_gqa=query_BHD.shape[1] != key_PSKD.shape[2],
        seqused_k=length_B,
        block_table=table_BM,
    )
    return out_BHD
