"""The order of stages that share a state: they see it change in one order, under every plan.

A worker *learns* if a stage of it accumulates, or if it publishes weights: what its stages read
changes while the run goes on. Two rules give them what they would read in the eager run:

  * *between steps*: a worker that learns takes up a step when it has settled all earlier ones, so
    that its stages are complete and its weights are on their way;
  * *within a step*, in the order of the flow: stages before one that accumulates are complete
    before its first `finish` (before it takes items, where it has none), and those after it wait.

What must be complete first must not starve meanwhile: `whole_step_edges` says which limited edges
have to hold a whole step for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import inf

from m2flow.engine.plan import EdgePlan
from m2flow.engine.steps import StepState
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode


class Turns:
    """Which stages wait for which, because they belong to one worker that learns."""

    def __init__(self, graph: FlowGraph) -> None:
        sources = {edge.source for edge in graph.weight_edges}
        learning = {node.worker for node in graph.nodes if node.accumulates} | sources
        self._learns = [node.worker in learning for node in graph.nodes]
        self._before_items: dict[int, list[int]] = {}
        self._before_finish: dict[int, list[int]] = {}
        for first, second in _ordered(graph):
            table = self._before_items
            if not first.accumulates and second.has_finish:
                table = self._before_finish
            table.setdefault(second.index, []).append(first.index)

    def may_take_items(
        self, steps: Mapping[int, StepState], state: StepState, node: StageNode
    ) -> bool:
        """Whether the stages that must be complete before this one are."""
        if not self._learns[node.index]:
            return True
        for number, other in steps.items():
            if number < state.step and node.worker not in other.settled:
                return False
        return _complete(state, self._before_items.get(node.index, ()))

    def may_finish(self, state: StepState, node: StageNode) -> bool:
        """Whether nobody still reads the state that the stage's `finish` is about to change."""
        return _complete(state, self._before_finish.get(node.index, ()))


def whole_step_edges(
    graph: FlowGraph, edges: Mapping[tuple[int, int], EdgePlan], num_items: int
) -> set[tuple[int, int]]:
    """Edges that must hold a whole step, whatever their limit says, or the run could not end.

    Such an edge leads to a stage that cannot go on before the edge's own producer is complete, or
    away from a stage that fills its mini-batches by arrival: what is in the first one need not be
    among the oldest items, for which alone the edge has room.

    Args:
        graph: the flow.
        edges: limits by (producer, consumer).
        num_items: source items of a step.
    """
    limited = [
        (producer, consumer)
        for (producer, consumer), edge in sorted(edges.items(), key=lambda entry: entry[0][1])
        if edge.max_bytes is not None
        or (edge.max_items or inf) < num_items * graph.nodes[consumer].fanout
    ]
    whole = {edge for edge in limited if graph.nodes[edge[0]].by_arrival}
    limited = [edge for edge in limited if edge not in whole]
    while True:
        for edge in reversed(limited):  # one that is far downstream may free those before it
            if edge[0] in _complete_before(graph, edge[1], limited):
                whole.add(edge)
                limited.remove(edge)
                break
        else:
            return whole


def _complete_before(graph: FlowGraph, stage: int, limited: Sequence[tuple[int, int]]) -> set[int]:
    """Stages that must be complete before a stage can go on, if these edges have little room."""
    found: set[tuple[int, bool]] = set()
    pending = [(stage, False)]
    while pending:
        index, complete = here = pending.pop()
        if here in found:
            continue
        found.add(here)
        node = graph.nodes[index]
        mates = () if node.loop is None else graph.loops[node.loop].members
        made_by = [other for other in node.inputs if other != SOURCE]
        read_by = [consumer for producer, consumer in limited if producer == index]
        pending += [(other, complete) for other in (*mates, *made_by, *read_by)]
        earlier = [other for other in graph.nodes[:index] if other.worker == node.worker]
        pending += [(other.index, True) for other in earlier if _comes_first(earlier, other, node)]
    return {index for index, complete in found if complete}


def _comes_first(earlier: Sequence[StageNode], first: StageNode, second: StageNode) -> bool:
    """Whether all of one stage comes before some items of another one.

    Args:
        earlier: the stages of the worker before `second`.
        first: one of them.
        second: a stage of the same worker.
    """
    if any(node.accumulates for node in earlier if node.index >= first.index):
        return True
    return second.accumulates and (second.minibatches > 1 or not second.has_finish)


def _ordered(graph: FlowGraph) -> list[tuple[StageNode, StageNode]]:
    """Pairs of stages of one worker of which one accumulates, in the order of the flow."""
    return [
        (first, second)
        for first, second in combinations(graph.nodes, 2)
        if first.worker == second.worker and (first.accumulates or second.accumulates)
    ]


def _complete(state: StepState, stages: Sequence[int]) -> bool:
    return all(state.ledgers[stage].complete for stage in stages)
