"""How long items are expected to take, read from the column that a stage has declared for it."""

from __future__ import annotations

from m2flow.errors import UserError
from m2flow.flow.batch import Batch, Ragged
from m2flow.flow.graph import SOURCE, FlowGraph


def item_lengths(graph: FlowGraph, producer: int, batch: Batch) -> tuple[float, ...]:
    """A number for each item that a stage (or SOURCE) has made; empty where nothing is known.

    Raises:
        UserError: the column is missing where only this stage can give it, or holds no numbers.
    """
    loop = None if producer == SOURCE else graph.nodes[producer].loop
    stream = producer if loop is None else graph.loops[loop].members[-1]
    name = graph.length_column(stream)
    if name is None:
        return ()
    reader = next(node for node in graph.nodes if node.length == name and stream in node.inputs)
    if name not in batch:
        # Another input of the reader may bring it, or the stage with which an item leaves a loop.
        if len(reader.inputs) > 1 or loop is not None:
            return ()
        raise UserError(
            f"is declared as the length of {reader.name}, but its input has no such column",
            key=name,
            expected=", ".join(batch.columns),
        )
    column = batch[name]
    if isinstance(column, Ragged):
        return tuple(float(length) for length in column.lengths)
    values = column.tolist() if hasattr(column, "tolist") else column
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise UserError(
            f"is declared as the length of {reader.name}, but holds no numbers",
            key=name,
            value=values[:1],
        ) from None
