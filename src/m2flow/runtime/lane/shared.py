"""Several lanes in one process, for emulated accelerators: lanes whose stages wait, not compute.

Each lane has its own control line, executor thread, payload store and payload server, as a lane in
a process of its own has. Items pass between lanes of one process by reference. What processes have
once, such lanes do without: they are bound to no cores, and have no collectives and no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from m2flow.engine.plan import LaneSpec
from m2flow.runtime.lane.actor import LaneAddress, LaneProcess, lines
from m2flow.runtime.lane.exchange import Exchange
from m2flow.runtime.transport.peering import PeerAddress


def await_order(lane: int, seconds: float) -> bool:
    """Wait until an order has come for a lane of this process, but no longer than `seconds`.

    For a streaming stage that waits on the lane's own thread: returns True if the next yield takes
    an order in. In a process that is no lane's it waits for all of `seconds`.
    """
    line = lines.get(lane)
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
        beside: dict[int, Exchange] = {}
        self._lanes = [
            LaneProcess(lane, position, folder, key, None, one_node, beside)
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
