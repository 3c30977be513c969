"""The marks that items of a loop carry: its `until` column, by which they leave."""

from __future__ import annotations

import math
from collections.abc import Sequence

from m2flow.errors import UserError
from m2flow.flow.batch import Batch, Column, Ragged
from m2flow.flow.graph import FlowGraph, StageNode


def leaving(batch: Batch, until: str) -> tuple[int, ...]:
    """Items whose mark is true; none where nothing is marked."""
    if until not in batch:
        return ()
    marks = _marks(until, batch[until])
    return tuple(item for item, done in zip(batch.ids, marks, strict=True) if done)


def _marks(until: str, column: Column) -> Sequence[object]:
    """The marks of a batch's items, one for each.

    Raises:
        UserError: an item has more than one, or has rows of them.
    """
    shape = getattr(column, "shape", None)
    if shape is not None:
        if math.prod(shape) == shape[0]:
            marks: list[object] = column.reshape(-1).tolist()  # rows that are tensors take long
            return marks
    elif not isinstance(column, Ragged) and not any(isinstance(x, list | tuple) for x in column):
        return column
    raise UserError(
        "says which items leave a loop, and holds more for an item",
        key=until,
        value=type(column).__name__ if shape is None else tuple(shape),
        expected="one truth value for each item",
    )


def entered(graph: FlowGraph, node: StageNode, given: Batch, output: Batch) -> Batch:
    """What the first member of a loop has made; marks that came in with the items are no answer.

    Raises:
        UserError: an item came with a mark that is true, and the member has left it as it was.
    """
    if node.loop is None or node.index != graph.loops[node.loop].members[0]:
        return output
    until = graph.loops[node.loop].until
    untouched = until in given and output.columns.get(until) is given[until]
    if untouched and (gone := leaving(given, until)):
        raise UserError(
            f"item {gone[0]} enters the loop with {until!r} already true",
            key=graph.loop_name(node.loop),
            hint="name another column with `until=`, or leave this one out before the loop",
        )
    return output
