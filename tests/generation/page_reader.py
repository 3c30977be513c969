"""`read_pages`: a `PageReader` that gathers all pages of all rows, and masks what is not seen."""

from __future__ import annotations

import torch
from torch import Tensor


def read_pages(
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
    out_BKGD: Tensor,
) -> None:
    """Nothing is looked at by the host, so a tape can hold it."""
    key_BKCD, value_BKCD = (
        pages_PSKD[table_BM.long()].flatten(1, 2)[:, :longest].transpose(1, 2)
        for pages_PSKD in (key_PSKD, value_PSKD)
    )
    column_C = torch.arange(key_BKCD.shape[2])
    seen_BC = column_C < length_B[:, None]
    if window is not None:
        seen_BC &= column_C >= length_B[:, None] - window
    score_BKGC = (query_BKGD @ key_BKCD.transpose(2, 3)) * scale
    if cap is not None:
        score_BKGC = (score_BKGC / cap).tanh() * cap
    share_BKGC = score_BKGC.masked_fill(~seen_BC[:, None, None], -torch.inf).softmax(-1)
    out_BKGD.copy_(share_BKGC @ value_BKCD)
