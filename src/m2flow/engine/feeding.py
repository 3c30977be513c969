"""`Feeder`: which streaming calls may be given more items while they run, and which they get.

A call is fed up to the plan's `max_running`. The feeder leases units and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from m2flow.engine.admission import Admission
from m2flow.engine.calls import Call
from m2flow.engine.lanes import LaneBoard
from m2flow.engine.messages import RunCall
from m2flow.engine.plan import StagePlan
from m2flow.engine.steps import StepState
from m2flow.flow.graph import StageNode


class Feeder:
    """Streaming calls that may have room.

    Args:
        stage_plans: of each stage.
        admission: what may be taken.
        board: lanes that are held for others are not fed.
    """

    def __init__(
        self,
        stage_plans: Sequence[StagePlan],
        admission: Admission,
        board: LaneBoard,
    ) -> None:
        self._stage_plans, self._admission = stage_plans, admission
        self._board = board
        self._hungry: dict[tuple[int, int], dict[int, Call]] = {}

    def may_be_fed(self, node: StageNode) -> bool:
        """Whether calls of the stage are ever given more items while they run."""
        return self._stage_plans[node.index].max_running is not None

    def hungry(self, call: Call, node: StageNode) -> None:
        """A call may have room for more items."""
        if self.may_be_fed(node):
            self._hungry.setdefault((call.step, node.index), {})[call.command.call] = call

    def ended(self, call: Call) -> None:
        """A call takes no more."""
        assert isinstance(call.command, RunCall)
        key = (call.step, call.command.node)
        calls = self._hungry.get(key)
        if calls is not None:
            calls.pop(call.command.call, None)
            if not calls:
                del self._hungry[key]

    def lease(
        self, steps: Mapping[int, StepState], state: StepState, node: StageNode
    ) -> Iterator[tuple[Call, list[int]]]:
        """Lease ready units to calls that have room, the least busy one first."""
        calls = self._hungry.get((state.step, node.index))
        ledger = state.ledgers[node.index]
        if not calls or not (ledger.ready() or ledger.sticky):
            return
        limit = self._stage_plans[node.index].max_running or 0
        for call in sorted(calls.values(), key=_least_busy) if limit else ():
            lanes = call.command.lanes
            room = min(limit - len(call.unfinished), ledger.ready(lanes[0]))
            if limit == len(call.unfinished):
                del calls[call.command.call]
            if room <= 0 or self._board.held(lanes):
                continue
            if not self._admission.weights_fresh_enough(node.worker, lanes, state.step):
                continue
            units = ledger.lease(lanes[0], room, self._admission.end(steps, state, node))
            if not units and not ledger.sticky:  # what holds one call back holds back all
                return
            if units:
                yield call, units


def _least_busy(call: Call) -> tuple[int, int]:
    return len(call.unfinished), call.command.call
