"""`LanesAhead`: lanes that start while the launcher does something else.

Ray and the lanes' processes take seconds to come up, and so do a launcher's own imports, data and
warm-up; none of them needs the other. What goes wrong with the lanes is raised when they are asked
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from m2flow.engine.plan import LaneSpec
from m2flow.runtime.pool import LanePool


class LanesAhead:
    """Use as a context manager: the lanes end with it.

    Args:
        lanes: what to start.
        modules: what the lanes import meanwhile, because workers will need it.
    """

    def __init__(self, lanes: Sequence[LaneSpec], modules: Sequence[str] = ()) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lanes ahead")
        self._pool: Future[LanePool] = self._thread.submit(_start, lanes, modules)

    def pool(self) -> LanePool:
        """The lanes, as soon as they are up.

        Raises:
            UserError: the cluster has no room for the lanes.
            RunFailed: they did not start in time.
        """
        return self._pool.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
        if self._pool.exception() is None:
            self._pool.result().__exit__(kind, error, trace)


def _start(lanes: Sequence[LaneSpec], modules: Sequence[str]) -> LanePool:
    pool = LanePool(lanes)
    pool.prepare(modules)
    return pool
