"""Several lanes in one process, for emulated accelerators: lanes whose stages wait, not compute.

Each lane has its own control line, executor thread, payload store and payload server, as a lane in
a process of its own has. Items pass between lanes of one process by reference. What processes have
once, such lanes do without: they are bound to no cores, and have no collectives and no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.runtime.lane.actor import LaneAddress, LaneProcess
from m2flow.runtime.lane.exchange import Exchange
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.runtime.transport.lines import Line

if TYPE_CHECKING:
    from m2flow.runtime.transport.peering import PeerAddress

_lines: dict[int, Line] = {}
"""Control lines of the lanes of this process, by lane."""


def await_order(lane: int, seconds: float) -> bool:
    """Wait until an order has come for a lane of this process, but no longer than `seconds`.

    For a streaming stage that waits on the lane's own thread: returns True if the next yield takes
    an order in. On a lane with a process of its own it waits for all of `seconds`.
    """
    line = _lines.get(lane)
    if line is None:
        time.sleep(seconds)
        return False
    return line.waiting(seconds)


class SharedProcess:
    """The actor that hosts several lanes.

    Args:
        lanes: position in the pool, and lane.
        folder, key, one_node: as for `LaneProcess`.
    """

    def __init__(
        self, lanes: Sequence[tuple[int, LaneSpec]], folder: str, key: bytes, one_node: bool
    ) -> None:
        self._beside: dict[int, Exchange] = {}
        self._lanes = [
            SharedLane(lane, position, folder, key, one_node, self._beside)
            for position, lane in lanes
        ]

    def ready(self) -> list[LaneAddress]:
        """Bring all lanes up; their addresses, in order."""
        return [lane.ready() for lane in self._lanes]

    def serve(self, peers: Mapping[int, PeerAddress], seconds: float) -> None:
        """Carry out the orders of every lane, each on a thread, until all are closed.

        Raises:
            BaseException: what a lane raised.
        """
        with ThreadPoolExecutor(len(self._lanes)) as threads:
            serving = [threads.submit(one.serve, peers, seconds) for one in self._lanes]
        for served in serving:
            served.result()


class SharedLane(LaneProcess):
    """One of the lanes of a shared process."""

    def __init__(
        self,
        lane: LaneSpec,
        position: int,
        folder: str,
        key: bytes,
        one_node: bool,
        beside: dict[int, Exchange],
    ) -> None:
        super().__init__(lane, position, folder, key, None, one_node)
        self._beside = beside

    def _make_exchange(self, node: str, host: str | None) -> Exchange:
        lane, position = self.lane.id, self.position
        return Exchange(lane, position, node, host, self.folder, self.key, beside=self._beside)

    def _make_groups(self, num_lanes: int) -> LaneGroups:
        return NoGroups(self.position, num_lanes, self._meeting)

    def _opened(self, line: Line) -> None:
        _lines[self.lane.id] = line


class NoGroups(LaneGroups):
    """Process groups are of processes; lanes that share one have none, and say so when asked."""

    def init(self, *_: Any, **__: Any) -> None:
        """Meet nobody."""

    def ensure(self, *_: Any, **__: Any) -> None:
        """Make no group."""

    def group(self, lanes: tuple[int, ...]) -> Any:
        """Nothing, which is refused only when it is used."""
        return None

    def all_reduce(self, lanes: tuple[int, ...]) -> Any:
        """A function that refuses to sum."""
        return _refuse

    def least(self, lanes: tuple[int, ...]) -> Any:
        raise UserError(
            "lanes that share a process cannot stream on a gang", key="lanes", value=lanes
        )


def _refuse(*_: Any) -> None:
    raise UserError("lanes that share a process have no collectives", key="lanes_per_process")
