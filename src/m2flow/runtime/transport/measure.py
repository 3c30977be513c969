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

import torch

from m2flow.errors import M2FlowError
from m2flow.flow.batch import Batch
from m2flow.runtime.lane.store import Store
from m2flow.runtime.transport.devices import STAGED, Standing, scope_between
from m2flow.runtime.transport.peers import (
    LinkUnavailable,
    PeerAddress,
    PeerLost,
    Peers,
    TestPayload,
)
from m2flow.runtime.transport.shared_memory import PoolFull
from m2flow.runtime.transport.table import LinkCost, LinkTable, Scope

SIZES = (1 << 10, 1 << 20, 16 << 20)
MOST_REPEATS = 9
SECONDS_PER_SIZE = 0.015
"""After so long a size is not measured again; it is measured twice at least, the first to warm."""

BETWEEN_GPUS: Mapping[Scope, tuple[str, str]] = {
    "gpu": ("cuda_ipc", "no two lanes share one"),
    "gpus": ("cuda_ipc", "no second GPU here"),
    "gpu_cluster": ("nccl", "no GPU elsewhere"),
}
"""Of each scope of GPUs the link that is looked for, and what it means if there is no such pair."""

NO_GPU = "no GPU here"


def measure(
    peers: Peers,
    addresses: Iterable[PeerAddress],
    *,
    sizes: tuple[int, ...] = SIZES,
    further_links: Iterable[str] = (),
    timeout: float = 10.0,
) -> LinkTable:
    """Measure the links from here to one peer of each node.

    Args:
        peers: who asks.
        addresses: who may be asked; the first of each node is. Of several other nodes, the slowest
            counts for the scope `cluster`.
        sizes: bytes of the test payloads.
        further_links: names of links beyond `shared` and `stream`, as peers and servers have them.
        timeout: seconds for each transfer.

    Raises:
        PeerLost, TimeoutError: a peer does not answer.
    """
    addresses = list(addresses)
    asked: dict[str, PeerAddress] = {}
    for address in addresses:
        asked.setdefault(address.node, address)
    costs: dict[Scope, dict[str, LinkCost]] = {"lane": {"reference": reference_cost()}}
    for address in asked.values():
        scope: Scope = "node" if address.node == peers.node else "cluster"
        for kind in ("stream", "shared", *further_links):
            cost = _cost(peers, address, kind, sizes, timeout)
            if cost is None:
                continue
            known = costs.setdefault(scope, {}).get(kind)
            if known is None or cost.seconds(max(sizes)) > known.seconds(max(sizes)):
                costs[scope][kind] = cost
    return LinkTable(costs).merged(measure_gpus(peers, addresses, sizes=sizes, timeout=timeout))


def measure_gpus(
    peers: Peers,
    addresses: Iterable[PeerAddress],
    *,
    sizes: tuple[int, ...] = SIZES,
    timeout: float = 10.0,
) -> LinkTable:
    """Measure the links from this process's GPU to one peer of each scope, as `measure` does.

    Of a link that was looked for and does not work, the table says why.
    """
    nearest: dict[Scope, PeerAddress] = {}
    for address in addresses:
        scope = scope_between(peers.standing, Standing("", address.node, address.gpu))
        if scope is not None:
            nearest.setdefault(scope, address)
    costs: dict[Scope, dict[str, LinkCost]] = {}
    absent: dict[Scope, dict[str, str]] = {}
    for scope, address in nearest.items():
        kind, _ = BETWEEN_GPUS[scope]
        for way in (kind, STAGED):
            cost = _device_cost(peers, address, way, sizes, timeout)
            if isinstance(cost, LinkCost):
                costs.setdefault(scope, {})[way] = cost
            else:
                absent.setdefault(scope, {})[way] = cost
    return LinkTable(costs, absent=absent)


def _device_cost(
    peers: Peers, address: PeerAddress, kind: str, sizes: tuple[int, ...], timeout: float
) -> LinkCost | str:
    """What a way between two GPUs costs, or why there is none."""
    assert peers.devices is not None
    device = peers.devices.device

    def transfer(nbytes: int) -> Callable[[], None]:
        key = TestPayload(nbytes, on_device=True)
        return lambda: peers.fetch(address, key, timeout=timeout, link=kind, device=device)

    try:
        return LinkCost.fitted({nbytes: _median_seconds(transfer(nbytes)) for nbytes in sizes})
    except PeerLost:
        raise
    except M2FlowError as error:
        return str(error).splitlines()[0]


def completed(table: LinkTable, *, any_gpu: bool) -> LinkTable:
    """The table with a word on each scope of GPUs that nobody could measure."""
    silent = {
        scope: {kind: why if any_gpu else NO_GPU}
        for scope, (kind, why) in BETWEEN_GPUS.items()
        if scope not in table.costs and scope not in table.absent
    }
    return replace(table, absent={**table.absent, **silent})


def who_measures(places: Mapping[int, Standing]) -> dict[int, tuple[int, ...]]:
    """Which lanes measure, and to which others: the first lane to one of each machine, and for each
    scope of GPUs one lane to another.

    Args:
        places: where the lanes stand, by number, in order.
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


def _pairs_of_gpus(places: Mapping[int, Standing]) -> dict[Scope, tuple[int, int]]:
    """For each scope of GPUs the first two lanes that are so near to each other."""
    pairs: dict[Scope, tuple[int, int]] = {}
    earlier: dict[tuple[Scope, str], int] = {}
    for number, place in places.items():
        if place.gpu is None:
            continue
        alike: dict[Scope, str] = {"gpu": place.gpu, "gpus": place.node, "gpu_cluster": ""}
        for scope, key in alike.items():
            other = earlier.setdefault((scope, key), number)
            if other != number and scope_between(places[other], place) == scope:
                pairs.setdefault(scope, (other, number))
    return pairs


def reference_cost(repeats: int = 200) -> LinkCost:
    """What handing a Batch on within a lane takes: put into the store and gathered again."""
    batch = Batch({"tokens": torch.zeros(16, 64), "reward": torch.zeros(16)})

    def hand_over() -> None:
        store = Store()
        store.put("flow", 0, 0, batch)
        store.gather("flow", 0, [(0, batch.ids)])

    return LinkCost(_median_seconds(hand_over, repeats))


def _cost(
    peers: Peers, address: PeerAddress, kind: str, sizes: tuple[int, ...], timeout: float
) -> LinkCost | None:
    """None where there is no such link between the two."""

    def transfer(nbytes: int) -> Callable[[], None]:
        return lambda: peers.fetch(address, TestPayload(nbytes), timeout=timeout, link=kind)

    try:
        return LinkCost.fitted({nbytes: _median_seconds(transfer(nbytes)) for nbytes in sizes})
    except (LinkUnavailable, PoolFull, FileNotFoundError):
        return None


def _median_seconds(act: Callable[[], None], repeats: int = MOST_REPEATS) -> float:
    act()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < repeats and (not taken or time.perf_counter() - began < SECONDS_PER_SIZE):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return median(taken)
