"""What a lane reports of its work: events for the engine, spans and figures for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from m2flow.engine.messages import (
    CallCommand,
    Event,
    ExportWeights,
    InstallWeights,
    RunCall,
    RunFinish,
)
from m2flow.engine.spans import Span, ids_text
from m2flow.errors import UserError
from m2flow.flow.batch import Batch, Ragged
from m2flow.flow.graph import SOURCE, FlowGraph

NO_FACTS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Published:
    """What sending or installing weights has taken.

    Attributes:
        source: the worker whose weights they are.
        num_bytes: bytes that were moved, or copied, for it.
        seconds: how long the lane was busy with it.
    """

    source: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a carrier says: an event for the engine, and facts for people.

    Attributes:
        event: what happened; None for facts alone.
        spans: what a lane did meanwhile.
        metrics: what a `finish` returned (by the first lane of its gang).
        published: what an export or an install of weights has taken.
        note: what people should know, once.
        at: when the report was made, in seconds since the epoch.
    """

    event: Event | None
    spans: tuple[Span, ...] = ()
    metrics: Mapping[str, float] | None = None
    published: Published | None = None
    note: str = ""
    at: float = field(default_factory=time.time, compare=False)


def call_span(
    graph: FlowGraph,
    command: CallCommand,
    lane: int,
    start: float,
    end: float,
    further: Mapping[str, object] = NO_FACTS,
) -> Span:
    """The span of a call that a lane has finished."""
    facts: dict[str, object]
    match command:
        case RunCall(node=node, step=step):
            share = command.inputs[command.lanes.index(lane)]
            ids = sorted(item for part in share[0] for item in part.items)
            name = graph.nodes[node].name
            facts = {"step": step, "items": len(ids), "ids": ids_text(ids), "call": command.call}
            return Span(lane, name, "call", start, end, {**facts, **further})
        case RunFinish(node=node, step=step, minibatch=minibatch):
            name = graph.nodes[node].name
            facts = {"step": step, "minibatch": minibatch, "call": command.call}
            return Span(lane, name, "finish", start, end, {**facts, **further})
        case ExportWeights(source=worker, version=version):
            facts = {"version": version, "what": "export", "source": worker}
            return Span(lane, worker, "publish", start, end, facts)
        case InstallWeights(source=source, target=worker, version=version, local=local):
            facts = {"version": version, "what": "install", "source": source, "local": local}
            return Span(lane, worker, "publish", start, end, facts)


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
