"""Switch points: when the tail of a streaming stage begins, and who goes on with it.

Shares are counted in output items, so that an item that becomes several is done bit by bit. From
the switch point of a step on only the kept replicas take items of the stage in that step; the
others give back what they have not finished. What is left is spread evenly over the kept calls, but
none holds more outputs than a call of the plan may begin with: a tail needs no more memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from m2flow.engine.ledger import StageLedger
from m2flow.engine.plan import Plan, StagePlan
from m2flow.engine.steps import StepState
from m2flow.flow.graph import FlowGraph, StageNode


class Tails:
    """The switch points of a plan.

    Args:
        graph: the flow.
        plan: whose stages may have a switch point.
    """

    def __init__(self, graph: FlowGraph, plan: Plan) -> None:
        self._stages = [plan.stages.get(node.name, StagePlan()) for node in graph.nodes]
        self._kept: dict[int, tuple[tuple[int, ...], ...]] = {}
        for node, stage in zip(graph.nodes, self._stages, strict=True):
            if stage.switch_at is not None:
                replicas = plan.placements[node.worker].replicas
                self._kept[node.index] = replicas[: stage.kept(len(replicas))]

    def may_be_fed(self, node: StageNode) -> bool:
        """Whether calls of the stage are ever given more items while they run."""
        return node.index in self._kept or self._stages[node.index].max_running is not None

    def begins(self, state: StepState, node: StageNode, num_made: int) -> bool:
        """Count outputs that the stage has made; whether its tail begins by this."""
        share = self._stages[node.index].switch_at
        if share is None or node.index in state.tails:
            return False
        made = state.made[node.index] = state.made.get(node.index, 0) + num_made
        if made < share * state.num_items * node.fanout * node.expands:
            return False
        state.tails.add(node.index)
        return True

    def takes_part(self, state: StepState, node: StageNode, lanes: tuple[int, ...]) -> bool:
        """Whether the replica on these lanes takes items of the stage in this step (still)."""
        return node.index not in state.tails or lanes in self._kept[node.index]

    def begun(self, state: StepState, node: StageNode) -> bool:
        """Whether the stage's tail has begun in a step."""
        return node.index in state.tails

    def lease_first(
        self, state: StepState, node: StageNode, ledger: StageLedger, lane: int, end: int
    ) -> list[int]:
        """Lease an even part of what waits, for a call that begins in the tail."""
        part = -(-ledger.ready(lane) // len(self._kept[node.index]))
        units: list[int] = []
        room = self._most_outputs(node, ledger)
        while len(units) < part and (unit := _lease_one(ledger, lane, end, room)) is not None:
            room -= ledger.outputs_left(unit)
            units.append(unit)
        return sorted(units)

    def lease_more(
        self,
        node: StageNode,
        ledger: StageLedger,
        end: int,
        calls: Mapping[int, tuple[int, int]],
    ) -> dict[int, list[int]]:
        """Lease what waits, unit by unit, for the call that has least to do.

        Args:
            node, ledger: the stage.
            end: as for `StageLedger.lease`.
            calls: number of a call to its lane and how many outputs it has to make.

        Returns:
            number of a call to its new units.
        """
        most = self._most_outputs(node, ledger)
        queue = [(held, number) for number, (_, held) in calls.items()]
        heapify(queue)
        leased: dict[int, list[int]] = {}
        while queue and ledger.ready():
            held, number = heappop(queue)
            unit = _lease_one(ledger, calls[number][0], end, most - held)
            if unit is not None:
                leased.setdefault(number, []).append(unit)
                heappush(queue, (held + ledger.outputs_left(unit), number))
        return {number: sorted(units) for number, units in leased.items()}

    def _most_outputs(self, node: StageNode, ledger: StageLedger) -> int:
        stage = self._stages[node.index]
        return (stage.max_running or stage.chunk or ledger.num_units) * node.expands


def _lease_one(ledger: StageLedger, lane: int, end: int, room: int) -> int | None:
    """Lease a unit if no more of its outputs are to come than there is room for."""
    for unit in ledger.lease(lane, 1, end):
        if ledger.outputs_left(unit) <= room:
            return unit
        ledger.give_back(unit)
    return None
