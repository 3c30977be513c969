"""Context switching: whose state is on a lane, and what must make way for whom.

A lane with no memory limit keeps everything resident. With a limit, the worker that was used
longest ago is offloaded first. The moves are commands to a lane that carries out its commands in
order, so nothing waits for them and no lock exists.
"""

from __future__ import annotations

from m2flow.engine.messages import MoveState
from m2flow.engine.plan import Plan
from m2flow.errors import PlanError


class Residency:
    """Resident workers of every lane, least recently used first."""

    def __init__(self, plan: Plan) -> None:
        self._bytes = {worker: spot.state_bytes for worker, spot in plan.placements.items()}
        self._limit = {lane.id: lane.memory_bytes for lane in plan.lanes}
        self._resident: dict[int, dict[str, None]] = {lane.id: {} for lane in plan.lanes}

    def bring(self, workers: list[str], lane: int) -> list[MoveState]:
        """Moves after which all of `workers` are resident on the lane."""
        limit = self._limit[lane]
        if limit is None:
            return []
        needed = sum(self._bytes[worker] for worker in workers)
        if needed > limit:
            raise PlanError(
                f"{' and '.join(workers)} cannot be resident together on lane {lane}",
                value=needed,
                expected=f"at most {limit} bytes",
            )
        resident = self._resident[lane]
        moves: list[MoveState] = []
        for worker in workers:
            resident.pop(worker, None) if worker in resident else moves.append(
                MoveState("onload", worker, lane)
            )
        used = sum(self._bytes[worker] for worker in resident)
        evicted: list[MoveState] = []
        while used + needed > limit:
            oldest = next(iter(resident))
            del resident[oldest]
            used -= self._bytes[oldest]
            if self._bytes[oldest]:
                evicted.append(MoveState("offload", oldest, lane))
        resident.update(dict.fromkeys(workers))
        return evicted + [move for move in moves if self._bytes[move.worker]]
