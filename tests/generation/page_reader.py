"""`read_pages`: a `PageReader` that gathers all pages of all rows, and masks what is not seen.

What a team has in common it takes from the pages of the team's first row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m2flow.generation.shared_prefix import SharedPrefixes


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
    shared: SharedPrefixes | None = None,
    out_BKGD: Tensor,
) -> None:
    """Nothing is looked at by the host, so a tape can hold it."""
    key_BKCD, value_BKCD = (
        pages_PSKD[table_BM.long()].flatten(1, 2)[:, :longest].transpose(1, 2)
        for pages_PSKD in (key_PSKD, value_PSKD)
    )
    column_C = torch.arange(key_BKCD.shape[2])
    if shared is not None:
        leader_B = leaders(shared, len(table_BM))
        ours_BC = column_C < shared.tokens_B[:, None]
        key_BKCD, value_BKCD = (
            torch.where(ours_BC[:, None, :, None], own_BKCD[leader_B], own_BKCD)
            for own_BKCD in (key_BKCD, value_BKCD)
        )
    seen_BC = column_C < length_B[:, None]
    if window is not None:
        seen_BC &= column_C >= length_B[:, None] - window
    score_BKGC = (query_BKGD @ key_BKCD.transpose(2, 3)) * scale
    if cap is not None:
        score_BKGC = (score_BKGC / cap).tanh() * cap
    share_BKGC = score_BKGC.masked_fill(~seen_BC[:, None, None], -torch.inf).softmax(-1)
    out_BKGD.copy_(share_BKGC @ value_BKCD)


def leaders(shared: SharedPrefixes, rows: int) -> Tensor:
    """Of each row the first of its team; itself where it has none."""
    row_TA = shared.teams_TA[:, 1:].long()
    leader_TA = row_TA[:, :1].expand_as(row_TA)
    leader_B = torch.arange(rows + 1)  # the last one for places that nobody has
    place_TA = torch.where(row_TA < 0, rows, row_TA)
    return leader_B.scatter(0, place_TA.flatten(), leader_TA.flatten())[:rows]
