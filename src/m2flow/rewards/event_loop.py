"""The event loop that coroutine functions of the user's share, in a daemon thread of the process.

What they keep in their modules, such as a client or a semaphore, belongs to the loop in which it
was used first. So rewards, tools and agents have one loop for as long as the process lives. A
coroutine that blocks the loop holds up what is under way there; what cannot begin there meanwhile
begins in a new loop, which is shared from then on.

`asyncio.to_thread` carries a call out in a thread of the loop's executor, and the end of the
interpreter waits for it: one call that never returns would hold it up. Here the threads are left
to themselves.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from m2flow.flow.progress import goes_on
from m2flow.user_code import caught

MOST_THREADS = 32
"""Calls that are carried out at a time; of a loop's usual executor it is the most as well."""

STUCK_SECONDS = 1.0
"""A loop that begins with nothing for so long is blocked."""

END_SECONDS = 1.0
"""How long a loop that nobody uses any more goes on, for what has been cancelled to end."""

SIGN_SECONDS = 1.0
"""How often a stage that waits for code of the user's says that it goes on: what that code may take
has a bound of its own."""

T = TypeVar("T")


class LateCoroutine(Exception):
    """A coroutine has not come to its end: it took too long, or others have cancelled it."""


def run_coroutine(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    """What a coroutine returns or raises in the shared loop; not to be called from within it.

    Args:
        coroutine: runs in the loop's thread.
        seconds: longest that it may take once it has begun, for which it waits `STUCK_SECONDS`.

    Raises:
        LateCoroutine: it takes longer, or is cancelled by another coroutine.
    """
    begins, begun = threading.Lock(), threading.Event()

    async def begin() -> tuple[Any, BaseException | None]:
        if not begins.acquire(blocking=False):
            return None, None  # it has begun in another loop
        begun.set()
        return await caught(lambda: coroutine)

    future = _begun(begin(), _lease())
    try:
        if not begun.wait(STUCK_SECONDS) and begins.acquire(blocking=False):
            future = _begun(caught(lambda: coroutine), _lease(new=True))
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > SIGN_SECONDS:
            if wait([future], SIGN_SECONDS).done:
                break
            goes_on()
        value, error = future.result(max(0.0, left))
    except TimeoutError:  # one that the coroutine raises is caught
        raise LateCoroutine(f"gave nothing within {seconds:g} s") from None
    except CancelledError:
        raise LateCoroutine("was cancelled by another coroutine") from None
    finally:
        future.cancel()
    if error is not None:
        raise error
    return cast("T", value)


def shared_loop() -> LoopThread:
    """The loop that coroutines share, for as long as it is not released."""
    thread, answered = _lease(), threading.Event()
    thread.loop.call_soon_threadsafe(answered.set)
    if answered.wait(STUCK_SECONDS):
        return thread
    thread.release()
    return _lease(new=True)


class LoopThread:
    """An event loop in a daemon thread, which ends when it is neither shared nor held any more.

    Attributes:
        loop: runs.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(DaemonThreads())
        self._holders = 0
        threading.Thread(target=self._run, name="m2flow coroutines", daemon=True).start()

    def hold(self) -> None:
        """Have it go on until `release`; under the lock."""
        self._holders += 1

    def release(self) -> None:
        """Hold it no more."""
        with _lock:
            self._holders -= 1
            self.end_if_unused()

    def end_if_unused(self) -> None:
        """End soon, if nobody holds or shares it; under the lock."""
        if not self._holders and self is not _shared:
            self.loop.call_soon_threadsafe(self.loop.call_later, END_SECONDS, self.loop.stop)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            with suppress(BaseException):  # `exit()` in a task, of which whoever awaits it is told
                self.loop.run_forever()
                stopped = True
        self.loop.close()


_lock = threading.Lock()
_shared: LoopThread | None = None


def _lease(*, new: bool = False) -> LoopThread:
    """Hold the shared loop, or a new one that is shared from now on."""
    global _shared
    with _lock:
        before = _shared
        if before is None or new:
            _shared = LoopThread()
            if before is not None:
                before.end_if_unused()
        assert _shared is not None
        _shared.hold()
        return _shared


def _begun(coroutine: Coroutine[Any, Any, T], thread: LoopThread) -> Future[T]:
    """Have a coroutine begin in a loop, which is held until it has ended."""
    future = asyncio.run_coroutine_threadsafe(coroutine, thread.loop)
    future.add_done_callback(lambda _: thread.release())
    return future


def _forget() -> None:
    """In a process that was forked: the loop's thread is not in it."""
    global _lock, _shared
    _lock, _shared = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


class _ThreadCall(Future[Any]):
    """A call that a thread of an executor carries out.

    Attributes:
        counts: whether its thread is one of those that the executor may have.
    """

    def __init__(self, call: Callable[[], Any], give_up: Callable[[_ThreadCall], None]) -> None:
        super().__init__()
        self.call, self._give_up, self.counts = call, give_up, True

    def cancel(self) -> bool:
        """Nobody waits for the call any more; it may run all the same."""
        cancelled = super().cancel()
        if not cancelled:
            self._give_up(self)
        return cancelled


class DaemonThreads(ThreadPoolExecutor):
    """Carries calls out in daemon threads; a loop takes no executor of another type.

    The thread of a call that runs and that nobody waits for any more is left to itself, and another
    one takes its place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._due: queue.SimpleQueue[_ThreadCall | None] = queue.SimpleQueue()
        self._begun = 0
        self._counting = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a call carried out; return what its result will be in."""
        call = _ThreadCall(partial(fn, *args, **kwargs), self._give_up)
        self._due.put(call)
        self._begin_another()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Have each thread end after its call; wait for none."""
        for _ in range(self._begun):
            self._due.put(None)

    def _begin_another(self) -> None:
        with self._counting:
            if self._begun == MOST_THREADS:
                return
            self._begun += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _give_up(self, call: _ThreadCall) -> None:
        with self._counting:
            if not call.counts:
                return
            call.counts = False
            self._begun -= 1
        self._begin_another()

    def _work(self) -> None:
        while (due := self._due.get()) is not None:
            if not due.set_running_or_notify_cancel():
                continue
            try:
                due.set_result(due.call())
            except BaseException as error:  # noqa: BLE001, whoever awaits the call is told
                due.set_exception(error)
            with self._counting:
                if not due.counts:
                    return
                due.counts = False
