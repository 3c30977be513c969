"""Into how many calls the work of a stage is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from m2flow.engine.plan import Placement, StagePlan
from m2flow.flow.graph import FlowGraph, StageNode

PIECES = 4
"""Into how many calls a pipelined stage cuts the work of a replica and step. Mini-batches are such
cuts already."""

GROUPS = 2
"""How many groups of items are on their way around a loop whose members stand on lanes of their
own: while one group is with the one member, the other group is with the other."""

ITEMS_IN_TIME = 256
"""Items of a call at most where all items of an evaluation would be one: the test cases of so many
answers are run well within the deadline of a call, and those of ten thousand are not."""


def window_units(node: StageNode, num_items: int) -> int:
    """Units that a stage has to do in one mini-batch of a step of `num_items` source items."""
    total = num_items * node.fanout
    return total // node.unit_items(total) // node.minibatches


def call_items(node: StageNode, stage: StagePlan, num_items: int) -> int:
    """Items that a call of a stage holds at most, in a step of `num_items` source items."""
    units = window_units(node, num_items)
    each = node.unit_items(num_items * node.fanout)
    return min(stage.max_running or stage.chunk or units, units) * each


def cut(node: StageNode, num_items: int, calls: int) -> StagePlan:
    """Chunks with which a window of the stage takes so many calls."""
    return StagePlan(chunk=max(1, -(-window_units(node, num_items) // calls)))


def spread(
    graph: FlowGraph, placements: Mapping[str, Placement], num_items: int, calls: int = 1
) -> dict[str, StagePlan]:
    """Chunks with which each replica of a stage has so many calls in a window."""
    return {
        node.name: cut(node, num_items, calls * len(placements[node.worker].replicas))
        for node in graph.nodes
    }


def in_time(
    graph: FlowGraph, stages: Mapping[str, StagePlan], num_items: int
) -> dict[str, StagePlan]:
    """The stages of an evaluation, with calls of at most `ITEMS_IN_TIME` items (or one unit).

    Streaming stages, loops and what accumulates stay as they are: the first two give signs of life.
    """
    found = dict(stages)
    for node in graph.nodes:
        if node.streaming or node.loop is not None or node.accumulates:
            continue
        stage = stages.get(node.name, StagePlan())
        if call_items(node, stage, num_items) > ITEMS_IN_TIME:
            most = max(1, ITEMS_IN_TIME // node.unit_items(num_items * node.fanout))
            found[node.name] = replace(stage, chunk=most)
    return found


def pipelined(
    graph: FlowGraph,
    placements: Mapping[str, Placement],
    num_items: int,
    whole: frozenset[str] = frozenset(),
) -> dict[str, StagePlan]:
    """Chunks small enough that a stage begins while the one before it is still at work.

    A streaming stage hands its items on one by one, so it needs one call a replica. A loop that
    goes round on one set of lanes does too; where its members stand apart, its groups ping-pong.

    Args:
        graph, placements: what is placed where.
        num_items: source items of a step.
        whole: workers whose stages have one call a replica and window all the same.
    """
    stages = {}
    for node in graph.nodes:
        pieces = max(1, PIECES // node.minibatches)
        if node.streaming or node.worker in whole:
            pieces = 1
        if node.loop is not None:
            workers = {graph.nodes[member].worker for member in graph.loops[node.loop].members}
            apart = len({placements[worker].replicas for worker in workers}) > 1
            pieces = GROUPS if apart else 1
        calls = len(placements[node.worker].replicas) * pieces
        stages[node.name] = cut(node, num_items, calls)
    return stages
