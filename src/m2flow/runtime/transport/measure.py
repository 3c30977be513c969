"""What the ways between two lanes take, measured in a fraction of a second.

Test payloads of two sizes are fetched by each way that payloads take between the two; medians of
warm transfers. Between GPUs the payloads lie in their memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from statistics import median

from m2flow.runtime.transport.cuda_ipc import scope_between
from m2flow.runtime.transport.peering import Location, PeerAddress, TestPayload
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.table import CUDA_IPC, STAGED, LinkTable, Scope, TransferCost

SMALL, LARGE = 1 << 10, 16 << 20
MESSAGE, BLOCK = 16 << 10, 64 << 10
"""On one machine the first goes with the message, the second through shared memory."""

MOST_REPEATS = 9
SECONDS_PER_SIZE = 0.015
"""After so long a size is not measured again; it is measured twice at least, the first to warm."""

TRANSFER_SECONDS = 10.0
"""Longest that a transfer may take."""


def measure(peers: Peers, address: PeerAddress) -> LinkTable:
    """Measure the ways from a peer to here.

    Raises:
        PeerLost, TimeoutError: the peer does not answer.
    """
    costs: dict[Scope, Mapping[str, TransferCost]] = {}
    if address.node == peers.node:
        message, block = ((SMALL, MESSAGE), (BLOCK, LARGE))
        costs["node"] = dict([_cost(peers, address, *message), _cost(peers, address, *block)])
    else:
        costs["cluster"] = dict([_cost(peers, address, SMALL, LARGE)])
    gpus = scope_between(peers.location, Location("", address.node, address.gpu))
    if gpus is not None:
        link, cost = _cost(peers, address, SMALL, LARGE, on_device=True)
        costs[gpus] = {link if link == CUDA_IPC else STAGED: cost}
    return LinkTable(costs)


def _cost(
    peers: Peers, address: PeerAddress, small: int, large: int, *, on_device: bool = False
) -> tuple[str, TransferCost]:
    """Which way payloads of such sizes take, and what it costs."""
    device = peers.devices.device if on_device and peers.devices is not None else None

    def ask(nbytes: int) -> str:
        key = TestPayload(nbytes, on_device)
        return peers.receive(address, key, timeout=TRANSFER_SECONDS, device=device).link

    taken = [(nbytes, median_seconds(partial(ask, nbytes))) for nbytes in (small, large)]
    return ask(large), TransferCost.fitted(*taken)


def pairs_to_measure(places: Mapping[int, Location]) -> set[tuple[int, int]]:
    """Pairs of lanes between which all ways can be measured: the first of each scope.

    Args:
        places: where the lanes run, by number.
    """
    found: dict[Scope, tuple[int, int]] = {}
    for pair in combinations(places, 2):
        one, other = (places[lane] for lane in pair)
        found.setdefault("node" if one.node == other.node else "cluster", pair)
        gpus = scope_between(one, other)
        if gpus is not None:
            found.setdefault(gpus, pair)
    return set(found.values())


def median_seconds(act: Callable[[], object]) -> float:
    """The median time that an act takes once it is warm, within `SECONDS_PER_SIZE`."""
    act()
    taken: list[float] = []
    end = time.perf_counter() + SECONDS_PER_SIZE
    while not taken or (len(taken) < MOST_REPEATS and time.perf_counter() < end):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return median(taken)
