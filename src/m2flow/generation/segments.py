"""Which running sequences attend together, so that short ones do not pay for the longest.

Rows of the batch are cut into contiguous segments; each attends over a window as long as its
longest sequence. A cut saves reading the cache and costs another set of kernels. Plain integers,
no tensors. All sequences grow by one token a step, so differences of length, and with them the
best cuts, stay the same until a sequence comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence


def cut(lengths: Sequence[int], overhead: int) -> list[tuple[int, int, int]]:
    """Contiguous segments `(begin, end, longest)` that cover the rows, first to last.

    Greedy: at each place where it saves most, a segment is cut in two, as long as what it saves,
    in row-columns read from the cache, exceeds `overhead`. Good when the rows are roughly ordered
    longest first, right in any order.
    """
    longest = max(lengths, default=0)
    if len(lengths) * (longest - min(lengths, default=0)) <= overhead:
        return [(0, len(lengths), longest)] if lengths else []
    # The longest from a row on: a staircase downwards, whatever the order.
    longest_from = list(lengths)
    for row in range(len(lengths) - 2, -1, -1):
        longest_from[row] = max(longest_from[row], longest_from[row + 1])
    segments = []
    stack = [(0, len(lengths))]
    while stack:
        begin, end = stack.pop()
        top = longest_from[begin]
        saving, row = max(((end - r) * (top - longest_from[r]), r) for r in range(begin, end))
        if saving > overhead:
            stack += [(row, end), (begin, row)]
        else:
            segments.append((begin, end, top))
    return segments


def waste(lengths: Sequence[int], segments: Sequence[tuple[int, int, int]]) -> int:
    """Row-columns that these segments read and no sequence needs."""
    return sum((end - begin) * top for begin, end, top in segments) - sum(lengths)
