"""An event loop whose end waits for no thread, for coroutine functions of the user's.

`asyncio.to_thread` carries a call out in a thread of the loop's executor. The end of `asyncio.run`
waits for these threads, and so does the interpreter's: one call that never returns holds up both.
Here the threads are left to themselves.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

MOST_THREADS = 32
"""Calls that are carried out at a time; of a loop's usual executor it is the most as well."""

T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns or raises, in an event loop of its own, as by `asyncio.run`."""

    async def main() -> T:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        return await coroutine

    return asyncio.run(main())


class DaemonThreads(ThreadPoolExecutor):
    """Carries calls out in daemon threads; a loop takes no executor of another type."""

    def __init__(self) -> None:
        super().__init__()
        self._due: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._due = queue.SimpleQueue()
        self._begun = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a call carried out; return what its result will be in."""
        future: Future[Any] = Future()
        self._due.put((future, partial(fn, *args, **kwargs)))
        if self._begun < MOST_THREADS:
            self._begun += 1
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Have each thread end after its call; wait for none."""
        for _ in range(self._begun):
            self._due.put(None)

    def _work(self) -> None:
        while (due := self._due.get()) is not None:
            future, call = due
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001, whoever awaits the call is told
                future.set_exception(error)
