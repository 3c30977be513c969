"""`LanesAhead`: lanes that start while the launcher does something else.

Ray and the lanes' processes take seconds to come up, and so do a launcher's own imports, data and
warm-up; none of them needs the other. What goes wrong with the lanes is raised when they are asked
for.

Imports are not done beside each other: of modules that import each other, two threads that begin at
different ends are given some that are not done. So the lanes' own wait until the launcher says that
it has imported what it shares with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Self

from m2flow.engine.plan import LaneSpec
from m2flow.runtime.driver.cluster import check_address
from m2flow.runtime.driver.template import cluster_of
from m2flow.runtime.transport.sweeping import check_shared_memory

IMPORT_SECONDS = 600.0
"""The launcher says within that time that it has imported, or the lanes begin without its word."""

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool


class LanesAhead:
    """Use as a context manager: the lanes end with it.

    Args:
        lanes: what to start.
        modules: what the lanes import meanwhile, because workers will need it.
        spares, start_seconds: as for `LanePool`.

    Raises:
        UserError: there is no shared memory, or RAY_ADDRESS cannot be joined.
    """

    def __init__(
        self,
        lanes: Sequence[LaneSpec],
        modules: Sequence[str] = (),
        spares: int = 0,
        *,
        start_seconds: float = 0.0,
    ) -> None:
        check_shared_memory()
        check_address()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lanes ahead")
        self._imported, self._given_up = Event(), Event()
        events = self._imported, self._given_up
        self._pool: Future[LanePool] = self._thread.submit(
            _start, lanes, modules, spares, start_seconds, *events
        )

    def may_import(self) -> None:
        """Say that the launcher has imported `m2flow.runtime`, as far as it needs it."""
        self._imported.set()

    def pool(self) -> LanePool:
        """The lanes, as soon as they are up.

        Raises:
            UserError: the cluster has no room for the lanes.
            RunFailed: they did not start in time.
        """
        self.may_import()
        return self._pool.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self._given_up.set()
        self.may_import()
        if self._pool.exception() is None:
            # On the thread that connected to Ray: from another one, Ray waits 5 s for it.
            self._thread.submit(self._pool.result().__exit__, *error).result()
        self._thread.shutdown()


def _start(
    lanes: Sequence[LaneSpec],
    modules: Sequence[str],
    spares: int,
    start_seconds: float,
    imported: Event,
    given_up: Event,
) -> LanePool:
    cluster, template = cluster_of(lanes, modules)  # seconds, in other processes

    imported.wait(IMPORT_SECONDS)
    if given_up.is_set():
        cluster.close()
        if template is not None:
            template.close()
        raise CancelledError("nobody wants the lanes any more")
    from m2flow.runtime.driver.pool import LanePool  # torch comes along

    pool = LanePool(
        lanes, cluster=cluster, start_seconds=start_seconds, spares=spares, template=template
    )
    pool.prepare(modules)
    return pool
