"""Agents that hang, leave or give up cost their own call, and those behind them take their turn."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from m2flow.rewards.reward import LONGEST_REASON
from m2flow.workloads.agentic.endpoint.agents import Agents, Endpoint

SECONDS = 0.5


def sync(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """What the problem says."""
    if problem["prompt"] == "hang":
        time.sleep(3600)
    if problem["prompt"] == "exit":
        raise SystemExit(0)
    if problem["prompt"] == "cancel":
        raise asyncio.CancelledError


async def later(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """The same."""
    if problem["prompt"] == "hang":
        await asyncio.sleep(3600)
    sync(problem, endpoint)


class Keeps:
    """The same, of an object."""

    async def __call__(self, problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        await later(problem, endpoint)


@pytest.mark.parametrize("function", [sync, later, Keeps()], ids=["sync", "async", "object"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_each_costs_its_own_call(function: Callable[..., Any], concurrency: int) -> None:
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    agents = Agents(function, concurrency, SECONDS, ended)
    prompts = ["hang", "", "exit", "cancel", ""]
    try:
        for item, prompt in enumerate(prompts):
            agents.begin(item, {"prompt": prompt, "metadata": {}}, Endpoint("", ""))
        told = dict(ended.get(timeout=60) for _ in prompts)
    finally:
        agents.close()
    assert told[0] == f"the agent did not end within {SECONDS:g} s"
    assert told[1] == told[4] == ""
    assert told[2].startswith("the agent raised SystemExit: 0 (test_agents.py:")
    assert told[3].startswith("the agent raised CancelledError (test_agents.py:")
    assert ended.empty()


def test_what_an_agent_raises_is_one_short_line() -> None:
    def broken(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        raise OSError("no disk\n" + "  row\n" * 1000)

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    agents = Agents(broken, 1, SECONDS, ended)
    agents.begin(0, {"prompt": "", "metadata": {}}, Endpoint("", ""))
    _, why = ended.get(timeout=60)
    agents.close()
    assert why.startswith("the agent raised OSError: no disk row row ")
    assert "(test_agents.py:" in why[-40:]
    assert len(why) <= LONGEST_REASON


def test_what_agents_keep_in_a_module_serves_every_call_of_the_stage() -> None:
    """Each call had a loop of its own; and agents that it had left went on for nobody."""
    limit, stays, cancelled = asyncio.Semaphore(1), threading.Event(), threading.Event()

    async def agent(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
        async with limit:
            await asyncio.sleep(0)
        if problem["prompt"] == "stay":
            try:
                stays.set()
                await asyncio.sleep(3600)
            finally:
                cancelled.set()

    for _ in range(2):
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        agents = Agents(agent, 64, 60.0, ended)
        for item, prompt in enumerate(["", "", "", "stay"]):
            agents.begin(item, {"prompt": prompt}, Endpoint("", ""))
        told = [ended.get(timeout=60) for _ in range(3)]
        assert stays.wait(60)
        agents.close()
        assert [why for _, why in told] == [""] * 3
        assert cancelled.wait(60)
        stays.clear()
        cancelled.clear()


def test_a_call_in_a_thread_that_never_returns_does_not_hold_up_the_end() -> None:
    program = """
import asyncio, queue, threading
from m2flow.workloads.agentic.endpoint.agents import Agents, Endpoint

async def agent(problem, endpoint):
    await asyncio.to_thread(threading.Event().wait)

ended = queue.SimpleQueue()
agents = Agents(agent, 1, 0.1, ended)
agents.begin(0, {}, Endpoint("", ""))
print(ended.get(timeout=60)[1])
agents.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "the agent did not end within 0.1 s\n"


def test_a_function_that_gives_a_coroutine_is_run_to_its_end() -> None:
    """It was never awaited, and had asked nothing."""
    ran: list[str] = []

    async def inner(problem: Mapping[str, Any]) -> None:
        await asyncio.sleep(0)
        ran.append(problem["prompt"])

    def agent(problem: Mapping[str, Any], endpoint: Endpoint) -> Any:
        return inner(problem)

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    agents = Agents(agent, 1, 60.0, ended)
    agents.begin(0, {"prompt": "a"}, Endpoint("", ""))
    assert (ended.get(timeout=60), ran) == ((0, ""), ["a"])
    agents.close()
