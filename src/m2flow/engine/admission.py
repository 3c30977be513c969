"""Admission: may a stage take its next units now?

Two rules. *Weights*: a stage that runs on published weights may work on step s once the installed
version is at least s - max_staleness; versions are counted from what has been installed, so the
rule holds after a resume without further state. *Room*: an edge with a limit of n items admits
item i while i < low + n, where every item below `low` has been used by the consumer. Counting by
index instead of by number means that the oldest items are always admitted, as many as the stages
behind the edge need at once: stages that wait for each other's items cannot fill an edge with the
wrong ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from m2flow.engine.loops import LoopLedger
from m2flow.engine.plan import EdgePlan, Plan
from m2flow.engine.steps import StepState
from m2flow.engine.turns import whole_step_edges
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode


class Admission:
    """Installed versions and limits of edges.

    Args:
        graph: the flow.
        plan: gives `max_staleness` and the edges' limits.
        first_step: the version installed everywhere at the start.
    """

    def __init__(self, graph: FlowGraph, plan: Plan, first_step: int) -> None:
        self._graph, self._max_staleness = graph, plan.max_staleness
        self._installed = {
            (edge.source, edge.target, lane): first_step
            for edge in graph.weight_edges
            for lane in plan.placements[edge.target].lanes
        }
        self._sources: dict[str, list[str]] = {}
        for weights in graph.weight_edges:
            self._sources.setdefault(weights.target, []).append(weights.source)
        self._bytes_of_item: dict[int, float] = {}
        self._edges: dict[int, list[tuple[int, EdgePlan]]] = {}
        self._behind: dict[tuple[int, int], tuple[int, ...]] = {}
        self._limits: dict[tuple[int, int], EdgePlan] = {}
        self._whole: dict[int, set[tuple[int, int]]] = {}
        self._bounded: dict[int, list[int]] = {}
        for producer, consumer in graph.edges:
            edge = plan.edges.get(graph.edge_name(producer, consumer))
            if edge is None or producer == SOURCE or _inside_a_loop(graph, producer, consumer):
                continue
            self._limits[producer, consumer] = edge
            for member in _members(graph, producer):
                self._edges.setdefault(member, []).append((consumer, edge))
                self._behind[member, consumer] = graph.between(producer, consumer)
                self._bounded.setdefault(consumer, []).append(member)

    def lag(self, worker: str, lanes: tuple[int, ...], step: int) -> int | None:
        """Versions between a step and what the lanes run on; None without published weights."""
        sources = self._sources.get(worker)
        if sources is None:
            return None
        return step - min(self._installed[s, worker, lane] for s in sources for lane in lanes)

    def weights_fresh_enough(self, worker: str, lanes: tuple[int, ...], step: int) -> bool:
        lag = self.lag(worker, lanes, step)
        return lag is None or lag <= self._max_staleness

    def installed(self, source: str, target: str, lane: int, version: int) -> None:
        self._installed[source, target, lane] = version

    def versions_on(self, lane: int) -> dict[tuple[str, str], int]:
        """By source and target the versions that are installed on a lane."""
        return {
            (source, target): version
            for (source, target, where), version in self._installed.items()
            if where == lane
        }

    def observe_bytes(self, node: int, num_items: int, num_bytes: int) -> None:
        """Learn how large a stage's items are: the largest mean of a call counts."""
        if num_items and node in self._edges:
            mean = num_bytes / num_items
            self._bytes_of_item[node] = max(mean, self._bytes_of_item.get(node, 0.0))

    def bounded_producers(self, consumer: int) -> list[int]:
        """Stages that may have room again when this one has used items."""
        return self._bounded.get(consumer, [])

    def end(self, steps: Mapping[int, StepState], state: StepState, node: StageNode) -> int:
        """First unit of the stage that the edges leading out of it have no room for."""
        ledger = state.ledgers[node.index]
        end = ledger.num_units
        span = ledger.unit_items * node.expands
        for consumer, edge in self._edges.get(node.index, ()):
            admitted = self._window_end(steps, state, node.index, consumer, edge) // span
            reader = state.ledgers[consumer]
            if not _older_items(steps, state, consumer):  # the oldest items always may
                needed = self._needed(state, node.index, consumer)
                oldest = (reader.low_item // needed + 1) * needed
                admitted = max(admitted, -(-oldest // span))
            end = min(end, admitted)
        if isinstance(ledger, LoopLedger):
            end = max(end, ledger.low)  # what is inside the loop already must be able to leave
        return end

    def _needed(self, state: StepState, producer: int, consumer: int) -> int:
        """Items that the stages behind an edge need at once, lest they wait for ever."""
        if state.num_items not in self._whole:
            edges = whole_step_edges(self._graph, self._limits, state.num_items)
            self._whole[state.num_items] = {
                (member, end) for start, end in edges for member in _members(self._graph, start)
            }
        if (producer, consumer) in self._whole[state.num_items]:
            return state.ledgers[consumer].num_items
        behind = self._behind[producer, consumer]
        return max(state.ledgers[stage].unit_items for stage in behind)

    def _window_end(
        self,
        steps: Mapping[int, StepState],
        state: StepState,
        producer: int,
        consumer: int,
        edge: EdgePlan,
    ) -> int:
        """First item of the step that the edge has no room for."""
        low = state.ledgers[consumer].low_item
        older = _older_items(steps, state, consumer)
        limits = [state.ledgers[consumer].num_items]
        if edge.max_items is not None:
            limits.append(low + edge.max_items - older)
        if edge.max_bytes is not None:
            size = self._bytes_of_item.get(producer)
            limits.append(low + (int(edge.max_bytes / size) - older if size else 0))
        return min(limits)


def _members(graph: FlowGraph, producer: int) -> tuple[int, ...]:
    """The node itself, or the members of the loop whose exit it stands for."""
    loop = graph.nodes[producer].loop
    return (producer,) if loop is None else graph.loops[loop].members


def _inside_a_loop(graph: FlowGraph, producer: int, consumer: int) -> bool:
    loop = graph.nodes[consumer].loop
    return loop is not None and graph.nodes[producer].loop == loop


def _older_items(steps: Mapping[int, StepState], state: StepState, consumer: int) -> int:
    """Items of earlier steps that the consumer has not used yet."""
    return sum(
        other.ledgers[consumer].num_items - other.ledgers[consumer].low_item
        for number, other in steps.items()
        if number < state.step
    )
