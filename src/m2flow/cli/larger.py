"""Larger clusters of the same kind: which is the smallest that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from m2flow.plan.profile.clusters import Cluster

FULL = 8
"""Lanes of a machine that is filled before there is a second one."""

MOST_LANES = 4096
"""Where the search ends."""


def smallest(cluster: Cluster, fits: Callable[[Cluster], bool]) -> Cluster | None:
    """The smallest larger cluster that fits; None if none up to MOST_LANES does."""
    for larger in fuller(cluster):
        if not fits(larger):
            continue
        if larger.machines[0].nodes == 1:
            return larger
        low, high = larger.machines[0].nodes // 2, larger.machines[0].nodes
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(with_nodes(larger, middle)) else (middle, high)
        return with_nodes(larger, high)
    return None


def fuller(cluster: Cluster) -> Iterator[Cluster]:
    """One machine with a lane more each time, until it is full; then twice as many each time."""
    first, rest = cluster.machines[0], cluster.machines[1:]
    if first.nodes == 1:
        for lanes in range(first.lanes_per_node + 1, FULL + 1):
            device = replace(first.device, lanes_per_node=lanes)
            first = replace(first, lanes_per_node=lanes, device=device)
            yield Cluster((first, *rest))
    nodes = 2 * first.nodes
    while nodes * first.lanes_per_node <= MOST_LANES:
        yield with_nodes(Cluster((first, *rest)), nodes)
        nodes *= 2


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """The cluster with so many of its first machines."""
    return Cluster((replace(cluster.machines[0], nodes=nodes), *cluster.machines[1:]))
