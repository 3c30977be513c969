"""Attention of sequences of different lengths in one kernel: torch's own, on CUDA (FlashAttention).

Sequences lie one after another, without padding and without a mask. A sequence may have more keys
than queries: its last query sees all of them, each one before it one key less.

Shapes: N queries and S keys of R sequences, H query heads, J key-value heads, D head dimension.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

WIDEST = 256
"""Largest head dimension of the kernel."""

STEP = 8
"""Head dimensions come in multiples of it."""


def reason_against(query: Tensor, value: Tensor, softcap: float | None = None) -> str | None:
    """Why the kernel cannot attend here; None where it can.

    Args:
        query: [..., D]; keys have the same D.
        value: its last dimension may be another one.
        softcap: of the scores, or None.
    """
    if not query.is_cuda:
        return "it runs on CUDA"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {query.dtype}"
    if softcap is not None:
        return "it does not cap scores"
    width = query.shape[-1]
    if value.shape[-1] != width or width > WIDEST or width % STEP:
        return f"its heads are of one width of at most {WIDEST}, a multiple of {STEP}"
    return None if _kernel() is not None else "it wants torch 2.11 or newer"


@cache
def warn_once(reason: str) -> None:
    """Say that attention on CUDA goes another way, which is slower and takes more memory."""
    _log.warning("packed training attends without the fused kernel: %s", reason)


def attend(
    query_NHD: Tensor,
    key_SJD: Tensor,
    value_SJD: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend within each sequence.

    Args:
        query_NHD, key_SJD, value_SJD: H is a multiple of J.
        query_ends, key_ends: int32 [R + 1], where each sequence ends, 0 first.
        most_queries, most_keys: of a sequence.
        scale: of the scores.
        window: keys that a query sees, its own included; None for all before it.

    Returns:
        [N, H, D].
    """
    kernel, options = _kernel(), dict[str, Any]()
    assert kernel is not None
    groups = query_NHD.shape[1] // key_SJD.shape[1]
    if groups > 1 and "enable_gqa" in inspect.signature(kernel).parameters:
        options["enable_gqa"] = True
    elif groups > 1:
        key_SJD = key_SJD.repeat_interleave(groups, dim=1)
        value_SJD = value_SJD.repeat_interleave(groups, dim=1)
    answer_NHD: Tensor = kernel(
        query_NHD, key_SJD, value_SJD, query_ends, key_ends, most_queries, most_keys,
        scale=scale, window_size=(-1 if window is None else window - 1, 0), **options,
    )  # fmt: skip
    return answer_NHD


@cache
def _kernel() -> Any:
    """torch's function; None where this torch has none, or one without windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None
