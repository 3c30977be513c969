"""Agents at work: calls of a user's function, one for each trajectory, that ask an endpoint.

The function is told a problem and where the endpoint is:

    async def solve(problem, endpoint):
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
        ...

It returns nothing that counts: what it has asked of the policy is the trajectory. Agents run in
threads, or as coroutines of one thread; what one raises costs its trajectory alone.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        ended: is put (item, why it failed or "") when a call has ended.
    """

    def __init__(
        self, function: Callable[..., Any], concurrency: int, ended: queue.SimpleQueue[Any]
    ) -> None:
        self._function, self._ended = function, ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: ThreadPoolExecutor | None = None
        if inspect.iscoroutinefunction(function):
            self._loop, self._turns = asyncio.new_event_loop(), asyncio.Semaphore(concurrency)
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        else:
            self._threads = ThreadPoolExecutor(concurrency)

    def begin(self, item: int, problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        """Have an agent work on a problem."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._awaited(item, problem, endpoint), self._loop)
        elif self._threads is not None:
            self._threads.submit(self._called, item, problem, endpoint)

    def close(self) -> None:
        """Leave those that still run to themselves."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _awaited(self, item: int, problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        async with self._turns:
            try:
                await self._function(problem, endpoint)
                self._ended.put((item, ""))
            except Exception as error:
                self._ended.put((item, _why(error)))

    def _called(self, item: int, problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        try:
            self._function(problem, endpoint)
            self._ended.put((item, ""))
        except Exception as error:
            self._ended.put((item, _why(error)))


def _why(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"the agent raised {type(error).__name__}: {str(error)[:300]} ({where})"
