"""The table of links as this machine has it, measured in a fraction of a second.

Test payloads of three sizes are fetched from one peer on this node and one on each other, by each
link that exists between the two; medians of warm transfers. Links that do not exist are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import torch

from m2flow.engine.store import Store
from m2flow.flow.batch import Batch
from m2flow.runtime.links.peers import LinkUnavailable, PeerAddress, Peers, TestPayload
from m2flow.runtime.links.shared_memory import PoolFull
from m2flow.runtime.links.table import LinkCost, LinkTable, Scope

SIZES = (1 << 10, 1 << 20, 16 << 20)
MOST_REPEATS = 9
SECONDS_PER_SIZE = 0.015
"""After so long a size is not measured again; it is measured twice at least, the first to warm."""


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
    return LinkTable(costs)


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
