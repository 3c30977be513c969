"""A Ray cluster of a test module's own; nothing of it is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from m2flow.engine.plan import LaneSpec
from m2flow.runtime.driver.cluster import RayCluster


@contextmanager
def local_cluster(num_cpus: int) -> Iterator[None]:
    """Ray is connected inside; `launch` and `LanePool` use the connection that they find."""
    cluster = RayCluster([LaneSpec(0, cores=tuple(range(num_cpus)))])
    try:
        yield
    finally:
        cluster.close()
