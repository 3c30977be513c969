"""What the ways between two lanes take, measured in a fraction of a second.

Test payloads of two sizes are fetched by each way that there is between the two; medians of warm
transfers. Between GPUs the payloads lie in their memory. A way that does not work is named, and
why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from statistics import median

from m2flow.errors import M2FlowError
from m2flow.runtime.transport.cuda_ipc import scope_between
from m2flow.runtime.transport.peering import Location, PeerAddress, PeerLost, TestPayload
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.table import (
    CUDA_IPC,
    SHARED,
    STAGED,
    STREAM,
    LinkTable,
    Scope,
    TransferCost,
)

SMALL, LARGE = 1 << 10, 16 << 20
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
    near = address.node == peers.node
    ways: dict[Scope, tuple[str, ...]] = (
        {"node": (STREAM, SHARED)} if near else {"cluster": (STREAM,)}
    )
    gpus = scope_between(peers.location, Location("", address.node, address.gpu))
    if gpus is not None:
        ways[gpus] = (CUDA_IPC, STAGED)
    costs: dict[Scope, dict[str, TransferCost]] = {}
    absent: dict[Scope, dict[str, str]] = {}
    for scope, kinds in ways.items():
        for kind in kinds:
            try:
                cost = _cost(peers, address, kind, on_device=scope == gpus)
                costs.setdefault(scope, {})[kind] = cost
            except PeerLost:
                raise
            except (M2FlowError, FileNotFoundError) as error:
                absent.setdefault(scope, {})[kind] = str(error).splitlines()[0]
    return LinkTable(costs, absent)


def _cost(peers: Peers, address: PeerAddress, kind: str, *, on_device: bool) -> TransferCost:
    device = peers.devices.device if on_device and peers.devices is not None else None

    def measured(nbytes: int) -> tuple[int, float]:
        ask = partial(peers.fetch, address, TestPayload(nbytes, on_device))
        transfer = partial(ask, timeout=TRANSFER_SECONDS, link=kind, device=device)
        return nbytes, median_seconds(transfer)

    return TransferCost.fitted(measured(SMALL), measured(LARGE))


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


def median_seconds(act: Callable[[], None], repeats: int = MOST_REPEATS) -> float:
    """The median time that an act takes once it is warm, within `SECONDS_PER_SIZE`."""
    act()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < repeats and (not taken or time.perf_counter() - began < SECONDS_PER_SIZE):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return median(taken)
