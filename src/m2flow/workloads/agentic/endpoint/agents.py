"""Agents at work: calls of a user's function, one for each trajectory, that ask an endpoint.

The function is told a problem and where the endpoint is:

    async def solve(problem, endpoint):
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
        ...

It returns nothing that counts: what it has asked of the policy is the trajectory. Agents run in
threads, or as coroutines in the event loop that the process has for them; what one raises costs its
trajectory alone.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from m2flow.rewards.event_loop import LoopThread, run_coroutine, shared_loop
from m2flow.rewards.reward import in_a_line
from m2flow.user_code import caught, gives_coroutines, what_raised
from m2flow.workloads.agentic.endpoint.server import MODEL


@dataclass(frozen=True)
class Endpoint:
    """Where an agent asks the policy.

    Attributes:
        base_url: of the API, `http://127.0.0.1:PORT/v1`.
        key: of this trajectory, an API key.
        model: what the policy is called there.
    """

    base_url: str
    key: str
    model: str = MODEL


class Agents:
    """Runs the function for many trajectories.

    Args:
        function: takes a problem (`prompt`, `metadata`) and an `Endpoint`.
        concurrency: calls that run at a time.
        seconds: that a call may take from its beginning; one that takes longer is cancelled, or
            left to itself where it is no coroutine, and another one takes its turn.
        ended: is put (item, why it failed or "") when a call has ended.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        concurrency: int,
        seconds: float,
        ended: queue.SimpleQueue[Any],
    ) -> None:
        self._function, self._seconds, self._ended = function, seconds, ended
        self._shared: LoopThread | None = None
        if gives_coroutines(function):
            self._shared, self._turns = shared_loop(), asyncio.Semaphore(concurrency)
            self._begun: list[Future[None]] = []
            return
        self._due: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._workers = [
            threading.Thread(target=self._work, daemon=True) for _ in range(concurrency)
        ]
        for worker in self._workers:
            worker.start()

    def begin(self, item: int, problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        """Have an agent work on a problem."""
        if self._shared is not None:
            call = self._in_turn(item, problem, endpoint)
            self._begun.append(asyncio.run_coroutine_threadsafe(call, self._shared.loop))
        else:
            self._due.put((item, problem, endpoint))

    def close(self) -> None:
        """Cancel those that still run, or leave them to themselves where they are no coroutines."""
        if self._shared is not None:
            for call in self._begun:
                call.cancel()
            self._shared.release()
            return
        self._closed.set()
        for _ in self._workers:
            self._due.put(None)

    async def _in_turn(self, item: int, problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        async with self._turns:
            call = caught(self._function, problem, endpoint)
            try:
                _, error = await asyncio.wait_for(call, self._seconds)
                why = "" if error is None else _why(error)
            except TimeoutError:
                why = self._too_late()
            self._ended.put((item, why))

    def _work(self) -> None:
        """Carry out calls one after the other, each in a thread that may be left to itself."""
        while (due := self._due.get()) is not None and not self._closed.is_set():
            call = threading.Thread(target=self._called, args=due, daemon=True)
            call.start()
            call.join(self._seconds)
            if call.is_alive():
                self._ended.put((due[0], self._too_late()))

    def _called(self, item: int, problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        why = ""
        try:
            found = self._function(problem, endpoint)
            if inspect.iscoroutine(found):  # of a function that does not say that it gives one
                run_coroutine(found, self._seconds)
        except BaseException as error:
            why = _why(error)
        self._ended.put((item, why))

    def _too_late(self) -> str:
        return f"the agent did not end within {self._seconds:g} s"


def _why(error: BaseException) -> str:
    return in_a_line(f"the agent raised {what_raised(error)}")
