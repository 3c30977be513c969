"""Context switching: whose state is on a lane, and what must make way for whom.

A lane with no memory limit keeps everything resident. On a lane with one, nothing is resident at
the start (a driver that loads a worker there offloads it again), and at every moment the states
that are resident and what the call at hand works with take no more than the limit. The worker that
was used longest ago makes way first; one without state never does. The moves are commands to a lane
that carries out its commands in order, so nothing waits for them and no lock exists.

One `Residency` tells of one run: engines whose steps alternate on the same lanes share it.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.engine.messages import MoveState
from m2flow.engine.plan import Plan
from m2flow.errors import PlanError


class Residency:
    """Resident workers of every lane, least recently used first.

    Args:
        plan: gives the lanes' limits, and the bytes of all workers of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._bytes = {worker: spot.state_bytes for worker, spot in plan.placements.items()}
        self._working = {worker: spot.working_bytes for worker, spot in plan.placements.items()}
        self._limit = {lane.id: lane.memory_bytes for lane in plan.lanes}
        self._resident: dict[int, dict[str, None]] = {lane.id: {} for lane in plan.lanes}

    def limited(self, lane: int) -> bool:
        """Whether anybody is ever moved on this lane."""
        return self._limit[lane] is not None

    def bring(self, workers: Sequence[str], lane: int, *, working: bool = False) -> list[MoveState]:
        """Moves after which all of `workers` are resident on the lane.

        Args:
            workers: whom a command needs.
            lane: where.
            working: whether it runs a stage of theirs, one at a time, and so needs memory to work
                in as well.

        Raises:
            PlanError: they do not fit there, even with every other state away.
        """
        limit = self._limit[lane]
        if limit is None:
            return []
        states = sum(self._bytes[worker] for worker in workers)
        room = max((self._working[worker] for worker in workers), default=0) if working else 0
        if states + room > limit:
            what = f"{' and '.join(workers)} cannot be resident together on lane {lane}"
            if len(workers) == 1:
                what = f"{workers[0]} does not fit on lane {lane}"
            what += f" with {room} bytes to work in" if room else ""
            raise PlanError(what, value=states + room, expected=f"at most {limit} bytes")
        resident = self._resident[lane]
        moves = []
        for worker in workers:
            if worker not in resident:
                moves.append(MoveState("onload", worker, lane))
            resident.pop(worker, None)
        moves = self._evict(lane, limit - states - room) + moves
        resident.update(dict.fromkeys(workers))
        return moves

    def lost(self, lane: int) -> None:
        """A lane comes up anew: nobody is resident there."""
        self._resident[lane].clear()

    def put_away(self, lane: int) -> list[MoveState]:
        """Moves after which nobody with a state is resident, as at the start; none if unlimited."""
        return self._evict(lane, 0) if self.limited(lane) else []

    def _evict(self, lane: int, room: int) -> list[MoveState]:
        """Offload until the resident states take no more than `room` bytes."""
        resident = self._resident[lane]
        used = sum(self._bytes[worker] for worker in resident)
        moves = []
        for worker in list(resident):
            if used <= room:
                break
            if self._bytes[worker]:
                del resident[worker]
                used -= self._bytes[worker]
                moves.append(MoveState("offload", worker, lane))
        return moves
