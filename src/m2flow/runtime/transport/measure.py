"""The table of links as this machine has it, measured in a fraction of a second.

Test payloads of three sizes are fetched from one peer on this node and one on each other, by each
link that exists between the two; medians of warm transfers. Links that do not exist are left out.
Between GPUs the payloads lie in their memory; a link that does not exist there is named, and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median

from m2flow.errors import M2FlowError
from m2flow.runtime.transport.cuda_ipc import CUDA_IPC
from m2flow.runtime.transport.devices import STAGED, scope_between
from m2flow.runtime.transport.peering import (
    Location,
    PeerAddress,
    PeerLost,
    TestPayload,
)
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.table import LinkTable, Scope, TransferCost

SIZES = (1 << 10, 1 << 20, 16 << 20)
MOST_REPEATS = 9
SECONDS_PER_SIZE = 0.015
"""After so long a size is not measured again; it is measured twice at least, the first to warm."""

TRANSFER_SECONDS = 10.0
"""Longest that a transfer may take."""

NO_PAIR: Mapping[Scope, str] = {"gpu": "no two lanes share one", "gpus": "no second GPU here"}
"""Of each scope of GPUs what it means if no two lanes are that near to each other."""

NO_GPU = "no GPU here"


def measure(peers: Peers, addresses: Iterable[PeerAddress], *, objects: bool = False) -> LinkTable:
    """Measure the links from here to one peer of each node, and to one on a GPU of each scope.

    Args:
        peers: who asks.
        addresses: who may be asked; the first of each node is. Of several other nodes, the slowest
            counts for the scope `cluster`.
        objects: whether both sides have an end of Ray's object store, to be measured too.

    Raises:
        PeerLost, TimeoutError: a peer does not answer.
    """
    addresses = list(addresses)
    asked: dict[str, PeerAddress] = {}
    for address in addresses:
        asked.setdefault(address.node, address)
    costs: dict[Scope, dict[str, TransferCost]] = {}
    for address in asked.values():
        scope: Scope = "node" if address.node == peers.node else "cluster"
        for kind in ("stream", "shared", *(("object",) if objects else ())):
            cost = _cost(peers, address, kind)
            known = costs.get(scope, {}).get(kind)
            if isinstance(cost, TransferCost) and (known is None or _slower(cost, known)):
                costs.setdefault(scope, {})[kind] = cost
    return LinkTable(costs).merged(measure_gpus(peers, addresses))


def measure_gpus(peers: Peers, addresses: Iterable[PeerAddress]) -> LinkTable:
    """Measure the links from this process's GPU to one peer of each scope, as `measure` does.

    Of a link that was looked for and does not work, the table says why.
    """
    nearest: dict[Scope, PeerAddress] = {}
    for address in addresses:
        scope = scope_between(peers.location, Location("", address.node, address.gpu))
        if scope is not None:
            nearest.setdefault(scope, address)
    costs: dict[Scope, dict[str, TransferCost]] = {}
    absent: dict[Scope, dict[str, str]] = {}
    for scope, address in nearest.items():
        for way in (CUDA_IPC, STAGED):
            cost = _cost(peers, address, way, on_device=True)
            if isinstance(cost, TransferCost):
                costs.setdefault(scope, {})[way] = cost
            else:
                absent.setdefault(scope, {})[way] = cost
    return LinkTable(costs, absent=absent)


def _cost(
    peers: Peers, address: PeerAddress, kind: str, *, on_device: bool = False
) -> TransferCost | str:
    """What a link costs, or why there is none between the two."""
    device = peers.devices.device if on_device and peers.devices is not None else None

    def transfer(nbytes: int) -> Callable[[], None]:
        key = TestPayload(nbytes, on_device)
        return lambda: peers.fetch(address, key, timeout=TRANSFER_SECONDS, link=kind, device=device)

    try:
        return TransferCost.fitted({nbytes: median_seconds(transfer(nbytes)) for nbytes in SIZES})
    except PeerLost:
        raise
    except (M2FlowError, FileNotFoundError) as error:
        return str(error).splitlines()[0]


def _slower(one: TransferCost, other: TransferCost) -> bool:
    return one.seconds(max(SIZES)) > other.seconds(max(SIZES))


def completed(table: LinkTable, *, any_gpu: bool) -> LinkTable:
    """The table with a word on each scope of GPUs that nobody could measure."""
    silent = {
        scope: {CUDA_IPC: why if any_gpu else NO_GPU}
        for scope, why in NO_PAIR.items()
        if scope not in table.costs and scope not in table.absent
    }
    return replace(table, absent={**table.absent, **silent})


def who_measures(places: Mapping[int, Location]) -> dict[int, tuple[int, ...]]:
    """Which lanes measure, and to which others: the first lane to one of each machine, and for each
    scope of GPUs one lane to another.

    Args:
        places: where the lanes run, by number, in order.
    """
    first, *others = places
    machines: dict[str, int] = {}
    for number in others:
        machines.setdefault(places[number].node, number)
    asked: dict[int, list[int]] = {first: list(machines.values())}
    for asker, peer in _pairs_of_gpus(places).values():
        if peer not in asked.setdefault(asker, []):
            asked[asker].append(peer)
    return {asker: tuple(peers) for asker, peers in asked.items() if peers}


def _pairs_of_gpus(places: Mapping[int, Location]) -> dict[Scope, tuple[int, int]]:
    """For each scope of GPUs the first two lanes that are so near to each other."""
    pairs: dict[Scope, tuple[int, int]] = {}
    earlier: dict[tuple[Scope, str], int] = {}
    for number, place in places.items():
        if place.gpu is None:
            continue
        alike: dict[Scope, str] = {"gpu": place.gpu, "gpus": place.node}
        for scope, key in alike.items():
            other = earlier.setdefault((scope, key), number)
            if other != number and scope_between(places[other], place) == scope:
                pairs.setdefault(scope, (other, number))
    return pairs


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
