"""`LaneBoard`: which lanes are idle, which replicas may start, and who waits for a set of lanes.

A *barrier* is a call that needs several lanes at once, or a certain lane next. It holds its lanes
from the moment it is asked for: they finish what they run and start nothing else. Barriers on one
lane start in the order they were asked for, and each is asked for on all its lanes at once, so two
barriers can never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from m2flow.engine.messages import ExportWeights, InstallWeights, RunFinish


@dataclass(eq=False, slots=True)
class Barrier:
    """A call that holds its lanes until all of them are idle.

    Attributes:
        command: what to run; None for a stage's call on a gang, whose items are leased when the
            lanes are there.
    """

    lanes: tuple[int, ...]
    step: int
    node: int
    replica: int = 0
    command: RunFinish | ExportWeights | InstallWeights | None = None


class LaneBoard:
    """State of all lanes.

    Args:
        lanes: their numbers.
        replicas: for each worker its gangs.
    """

    def __init__(
        self, lanes: Sequence[int], replicas: Mapping[str, tuple[tuple[int, ...], ...]]
    ) -> None:
        self.replicas = replicas
        self._idle_lanes = set(lanes)
        self._held: dict[int, deque[Barrier]] = {lane: deque() for lane in lanes}
        self._to_check: dict[int, None] = {}
        self._idle: dict[str, list[int]] = {w: list(range(len(r))) for w, r in replicas.items()}
        self._listed: dict[str, set[int]] = {w: set(range(len(r))) for w, r in replicas.items()}
        self._stands: dict[int, list[tuple[str, int]]] = {lane: [] for lane in lanes}
        for worker, gangs in replicas.items():
            for replica, gang in enumerate(gangs):
                for lane in gang:
                    self._stands[lane].append((worker, replica))

    def usable(self, gang: Sequence[int]) -> bool:
        """Whether all these lanes are idle and none is held by a barrier."""
        if len(gang) == 1:  # nearly always, and asked for with every event
            return gang[0] in self._idle_lanes and not self._held[gang[0]]
        return all(lane in self._idle_lanes and not self._held[lane] for lane in gang)

    def held(self, lanes: Sequence[int]) -> bool:
        """Whether a barrier holds any of them."""
        return any(self._held[lane] for lane in lanes)

    def occupy(self, lanes: Sequence[int]) -> None:
        """These lanes run a call, or are down."""
        self._idle_lanes.difference_update(lanes)

    def free(self, lane: int) -> None:
        """The lane has nothing to do; replicas whose lanes are all idle may start again."""
        self._idle_lanes.add(lane)
        self._to_check[lane] = None
        for worker, replica in self._stands[lane]:
            if replica not in self._listed[worker] and all(
                other in self._idle_lanes for other in self.replicas[worker][replica]
            ):
                self.put_back(worker, replica)

    def next_replica(self, worker: str) -> int | None:
        """Take the lowest replica off the list of idle ones; None if there is none usable."""
        idle, listed = self._idle[worker], self._listed[worker]
        while idle:
            replica = heappop(idle)
            listed.remove(replica)
            if self.usable(self.replicas[worker][replica]):
                return replica
        return None

    def put_back(self, worker: str, replica: int) -> None:
        """A replica that `next_replica` gave out was not used."""
        self._listed[worker].add(replica)
        heappush(self._idle[worker], replica)

    def ask(self, barrier: Barrier, *, first: bool = False) -> None:
        """Hold the barrier's lanes from now on; `first`: before those that hold them already."""
        for lane in barrier.lanes:
            queue = self._held[lane]
            queue.appendleft(barrier) if first else queue.append(barrier)
            self._to_check[lane] = None

    def asked(self, lane: int) -> list[RunFinish | ExportWeights | InstallWeights | None]:
        """The commands of the barriers that hold a lane."""
        return [barrier.command for barrier in self._held.get(lane, ())]

    def due(self) -> Barrier | None:
        """A barrier that is first in line on all of its lanes, which are idle; it is let go."""
        while self._to_check:
            lane = next(iter(self._to_check))
            queue = self._held[lane]
            if queue and all(
                other in self._idle_lanes and self._held[other][0] is queue[0]
                for other in queue[0].lanes
            ):
                barrier = queue[0]
                for other in barrier.lanes:
                    self._held[other].popleft()
                    self._to_check[other] = None
                return barrier
            del self._to_check[lane]
        return None
