"""Attention of a new token of each sequence over pages of keys and values.

What reads them on CUDA follows each sequence's row in a table of pages: torch's own kernel
(FlashAttention, torch 2.13), or where torch is older or has none for such heads one in Triton
(`triton_attention`). It reads the tokens that a sequence has, and none that a longer one beside it
would need.

Legend: B sequences, M pages of a sequence at most, P pages in all, S tokens of a page, K key-value
heads, G query heads of each, H = K G, D channels of a head.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from m2flow.generation.architecture import Architecture
from m2flow.generation.shared_prefix import SharedPrefixes

PAGE = 256
"""Tokens of a page: the kernel wants a multiple of it."""

WIDEST, STEP = 256, 8
"""Head dimensions: the largest, and what torch's kernel wants a multiple of."""


class PageReader(Protocol):
    """Attends over pages."""

    def __call__(
        self,
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
        shared: SharedPrefixes | None,
        out_BKGD: Tensor,
    ) -> None:
        """Attend with the last token of each sequence.

        Args:
            query_BKGD: of the last tokens.
            key_PSKD, value_PSKD: the pages of all sequences.
            table_BM: int32, the pages of each sequence in order.
            length_B: int32, tokens of each sequence, the last one included.
            longest: no sequence is longer; a number of the host, which does not look at `length_B`.
            scale: of the scores.
            window: tokens that are seen, the last one included; None for all.
            cap: scores are cap tanh(score / cap); None: as they are.
            shared: what sequences have in common: each has it in its own pages, too, and a reader
                may pay no heed. None where there is a window.
            out_BKGD: contiguous; takes the result.
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
    if a.head_dim > WIDEST:
        return f"the kernel's heads have at most {WIDEST} channels"
    return "Triton is not installed" if reader_of(a) is None else None


def reader_of(a: Architecture) -> PageReader | None:
    """What attends over pages on CUDA; None where neither torch nor Triton has it."""
    if _kernel() is not None and a.score_cap is None and a.head_dim % STEP == 0:
        return attend
    try:
        from m2flow.generation.triton_attention import attend as attend_in_triton
    except ImportError:
        return None
    return attend_in_triton


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
    """Attend by torch's kernel; see `PageReader`."""
    del shared  # it reads each sequence's own pages
    assert cap is None, "torch's kernel does not cap scores"
    query_BHD = query_BKGD.flatten(1, 2)
    starts = torch.arange(len(query_BHD) + 1, dtype=torch.int32, device=query_BHD.device)
    out_BHD = _kernel()(
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
    out_BKGD.copy_(out_BHD.view(out_BKGD.shape))
