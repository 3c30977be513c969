"""`LaneContext`: what a lane tells its workers about itself and the lanes beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from m2flow.flow.worker import Gang, Place, grid_of
from m2flow.runtime.lane.orders import Load, Placed
from m2flow.runtime.lane.streams import Agree
from m2flow.runtime.transport.groups import LaneGroups


@dataclass(frozen=True)
class LaneContext:
    """A lane as its workers are told of it.

    Attributes:
        lane: its number.
        position: its position among the lanes of the pool.
        device: "cpu" or "cuda:0".
        num_threads: threads that workers may use.
        groups: its process groups.
        host: address of the machine.
        spill: folder for state that is put away; no other user can enter it.
    """

    lane: int
    position: int
    device: str
    num_threads: int
    groups: LaneGroups
    host: str
    spill: Path

    def meet(self, order: Load) -> None:
        """Have the process groups that a run needs; those of earlier runs are still there."""
        if order.meeting is None:
            return
        store = order.meeting.store
        self.groups.init(
            self.spill / store if isinstance(store, str) else store,
            number=order.meeting.number,
            timeout_seconds=order.meeting.timeout_seconds,
            node_address=self.host,
            world=order.meeting.world,
            keeper=order.meeting.keeper,
        )
        self.groups.ensure(order.lane_sets)

    def agreements(self, placed: Mapping[str, Placed]) -> dict[str, Agree]:
        """For workers on gangs, how this lane agrees with the others of its gang."""
        return {
            name: self.groups.least(gang)
            for name, one in placed.items()
            if len(gang := one.replicas[self._replica(one)]) > 1
        }

    def _replica(self, placed: Placed) -> int:
        """Of which gang of a worker this lane is one."""
        return next(n for n, gang in enumerate(placed.replicas) if self.position in gang)

    def place(self, placed: Placed, version: int) -> Place:
        """Where a worker stands; its groups must be there."""
        positions, own, replica = placed.positions, self.position, self._replica(placed)
        place = Place(
            self.lane,
            positions.index(own),
            len(positions),
            self.device,
            self.num_threads,
            version,
            gang=Gang(
                placed.replicas[replica].index(own),
                len(placed.replicas[replica]),
                replica,
                len(placed.replicas),
                layout=placed.layout,
            ),
            spill=self.spill,
        )
        if placed.sums:
            place = replace(place, all_reduce=self.groups.all_reduce(positions))
        if place.gang.size > 1:
            mesh = self.groups.mesh(placed.replicas, self.device)
            place = replace(place, gang=replace(place.gang, mesh=mesh))
            if (grid := grid_of(placed.layout)) is not None:
                rows = self.groups.grid(placed.replicas, grid, self.device)
                place = replace(place, gang=replace(place.gang, grid=rows))
        return place
