"""Which running rows began from one prefill, so that its keys and values are read once for them.

Answers to one prompt have the same keys and values for it. A team of such rows reads those of one
of them together, the matrix of all their queries against each block, and each row goes on by itself
from there ("cascade" attention: Juravsky et al., "Hydragen", arXiv 2402.05099).

Legend: T teams, A what is known of one, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

TEAM = 16
"""Rows of a team at most: with eight query heads each they fill a tensor core's 128 lines."""

BLOCK = 64
"""Tokens that a reader takes at a time, of which a page has a multiple; so many, or a multiple of
it, are shared."""

WORTH = 1 << 14
"""Tokens that need not be read again, of all rows together, for which a further kernel pays."""


class Team(NamedTuple):
    """Rows, two at least, and how many first tokens they have in common."""

    rows: Sequence[int]
    tokens: int


class SharedPrefixes(NamedTuple):
    """What a reader of pages is told.

    Attributes:
        teams_TA: int32, of each team the tokens and then its rows, the rest -1; a team without
            tokens is none.
        tokens_B: int32, of each row the tokens that its team reads for it.
    """

    teams_TA: Tensor
    tokens_B: Tensor


def teams_of(prefixes: Sequence[tuple[int, int]]) -> list[Team]:
    """The teams of rows; none where they are not worth it.

    Args:
        prefixes: of each row the number of the prefill that it began from, and its tokens.
    """
    rows_of: dict[tuple[int, int], list[int]] = {}
    for row, prefix in enumerate(prefixes):
        rows_of.setdefault(prefix, []).append(row)
    teams = [
        Team(rows[first : first + TEAM], tokens // BLOCK * BLOCK)
        for (_, tokens), rows in rows_of.items()
        for first in range(0, len(rows) - 1, TEAM)
        if tokens >= BLOCK
    ]
    spared = sum((len(team.rows) - 1) * team.tokens for team in teams)
    return teams if spared >= WORTH else []
