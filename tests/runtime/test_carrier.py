"""The carrier and the pool without Ray: first causes, the last words of a lane."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import RayActorError

from m2flow.engine.messages import (
    CallFailed,
    CallFinished,
    CompleteStep,
    ItemsProduced,
    LaneLost,
    Part,
)
from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed, UserError
from m2flow.flow import Batch
from m2flow.runtime.driver import carrier as carrier_module
from m2flow.runtime.driver import pool as pool_module
from m2flow.runtime.driver import processes as processes_module
from m2flow.runtime.driver.carrier import RayCarrier, first_cause_first
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.processes import LaneProcesses
from m2flow.runtime.lane.orders import (
    CallMethod,
    GoesOn,
    LaneEnded,
    MethodResult,
    Reports,
    to_bytes,
)
from m2flow.runtime.lane.reports import Report
from m2flow.runtime.transport import lines
from m2flow.runtime.transport.lines import LauncherLine, Line
from m2flow.runtime.transport.peering import PeerLost
from tests.clock import Clock
from tests.plan.small_graphs import GRPO


def test_of_a_gang_the_lane_that_failed_first_in_time_is_the_cause() -> None:
    """Its peers fail in a collective that it has left, and may be heard of before it."""
    echo = Report(CallFailed(4, 1, RuntimeError("connection closed by peer")), at=2.0)
    cause = Report(CallFailed(4, 0, ValueError("no such token")), at=1.0)
    before = Report(CallFinished(3, 2), at=3.0)
    assert first_cause_first([echo, before, cause]) == [before, cause, echo]


def test_a_lane_that_is_lost_comes_before_what_others_missed_of_it() -> None:
    echo = Report(CallFailed(4, 1, RuntimeError("connection closed by peer")), at=1.0)
    lost = Report(LaneLost(0, "killed"), at=2.0)
    produced = Report(ItemsProduced(4, 1, (0,)), at=3.0)
    assert first_cause_first([echo, produced, lost]) == [produced, lost, echo]


PoolOf = Callable[..., tuple[Any, dict[int, Line]]]


@pytest.fixture
def pool_of() -> Iterator[PoolOf]:
    """Makes a pool of lanes that are ends of sockets here."""
    with ExitStack() as opened:
        yield partial(make_pool, opened)


def make_pool(opened: ExitStack, *lanes: int) -> tuple[Any, dict[int, Line]]:
    pool: Any = LanePool.__new__(LanePool)
    pool._inbox, pool._lines, pool._holding, pool._awaited = deque(), {}, set(), {}
    pool._selector = opened.enter_context(selectors.DefaultSelector())
    pool._woken, pool._waker = map(opened.enter_context, socket.socketpair())
    pool._selector.register(pool._woken, selectors.EVENT_READ, None)
    pool.lost = {}
    pool.spoiled, pool._checked = None, 0.0
    pool.processes = SimpleNamespace(known_end=lambda lane, seconds=0.0: None)
    ends = {}
    for lane in lanes:
        here, there = map(opened.enter_context, socket.socketpair())
        here.setblocking(False)
        pool._lines[lane], ends[lane] = LauncherLine(here), Line(there)
        pool._selector.register(pool._lines[lane], selectors.EVENT_READ, lane)
    return pool, ends


def test_nothing_that_was_said_is_dropped_when_a_lane_goes(pool_of: PoolOf) -> None:
    pool, ends = pool_of(0, 1)
    words = {lane: Reports([Report(CallFinished(lane, lane), at=0.0)]) for lane in (0, 1)}
    for lane, end in ends.items():
        end.send(to_bytes(words[lane]))
    ends[0].close()
    said: list[Any] = []
    while not any(isinstance(message, LaneEnded) for _, message in said):
        said += pool.receive(1.0)
    heard = [(lane, message) for lane, message in said if isinstance(message, Reports)]
    assert sorted(heard, key=lambda one: one[0]) == [(0, words[0]), (1, words[1])]
    assert [lane for lane, message in said if isinstance(message, LaneEnded)] == [0]
    assert pool.receive(0.0) == [], "an end is told once"
    assert "lane 0 was lost" in pool.spoiled


def test_a_lane_that_is_silent_and_gone_has_ended(
    pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine closes no line; whoever knows of its end is asked, and what it says is told."""
    pool, _ = pool_of(0)
    monkeypatch.setattr(pool_module, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(lines, "SILENCE_SECONDS", 0.0)
    assert pool.receive(0.0) == []
    pool._lines[0].on_silence = lambda: "the actor died: its machine is gone"
    ((lane, ended),) = pool.receive(0.0)
    assert lane == 0
    assert isinstance(ended, LaneEnded)
    assert "its machine is gone" in str(ended)


def test_ray_is_asked_about_lanes_on_other_machines(
    pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line to a lane of this machine ends with its process, and Ray need not be asked."""
    pool, _ = pool_of(0, 1)
    there = {"here": pool._lines[0], "elsewhere": pool._lines[1]}
    monkeypatch.setattr(processes_module, "connect", lambda line, *_, **__: there[line])

    def get(serving: Any, timeout: float) -> None:
        raise RayActorError(error_msg=f"{serving} died: its machine is gone")

    monkeypatch.setattr(processes_module.ray, "get", get)
    actor = Mock()
    actor.serve.remote.return_value = "the actor"
    processes: Any = LaneProcesses.__new__(LaneProcesses)
    processes.node, processes._key, processes._serving = "here", b"key", {}
    processes.addresses = {
        lane: SimpleNamespace(peer=None, line=node, node=node) for lane, node in enumerate(there)
    }
    processes.actors = dict.fromkeys((0, 1), actor)
    lines_to: dict[int, LauncherLine] = {}
    processes._serve([0, 1], lines_to, 0.0)
    assert lines_to[0].on_silence() is None
    assert lines_to[1].on_silence() == "the actor died: its machine is gone"


def test_whoever_has_fetched_something_wakes_the_control_loop(pool_of: PoolOf) -> None:
    pool, _ = pool_of(0)
    pool.wake()
    assert pool.receive(60.0) == []


class Pending(Future[Batch]):
    """What nobody may wait for."""

    def result(self, timeout: float | None = None) -> Batch:
        assert self.done(), "the control loop waited for it"
        return super().result(timeout)


@pytest.mark.timeout(60)
def test_collecting_what_a_step_returns_waits_for_nothing() -> None:
    """The control loop once stood still until the last lane had handed its items over."""
    pieces, woken = [Pending(), Pending()], list[bool]()
    coming = iter(pieces)
    carrier: Any = RayCarrier.__new__(RayCarrier)
    carrier.graphs, carrier.plan = {"step": GRPO}, SimpleNamespace(deadline_seconds=1.0)
    carrier._sources, carrier._released = {("step", 0): {}}, {}
    carrier.pool = SimpleNamespace(
        exchange=SimpleNamespace(fetch_later=lambda *_: next(coming)),
        wake=lambda: woken.append(True),
    )
    (last,) = GRPO.output_nodes
    parts = (Part(last, (1,), lane=0), Part(last, (0,), lane=1))
    output = carrier.collect("step", CompleteStep(0, 1, output=parts))
    for piece, item in zip(pieces, (1, 0), strict=True):
        assert not output.done()
        assert not woken
        piece.set_result(Batch({"x": [item]}, [item]))
    assert output.result()["x"] == [0, 1]
    assert woken


def carrier_on(pool: Any, elsewhere: bool = False) -> Any:
    """A carrier whose workers are loaded already; all lanes but 0 may be on other machines."""
    pool.lanes = tuple(LaneSpec(lane) for lane in pool._lines)
    pool.is_here = lambda lane: lane == 0 or not elsewhere
    pool.exchange = SimpleNamespace(forget=lambda lane: None)
    carrier: Any = RayCarrier.__new__(RayCarrier)
    carrier.pool, carrier._gang_calls, carrier.mender = pool, {}, None
    carrier.plan = SimpleNamespace(placements={})
    carrier.publisher = Mock()
    return carrier


@pytest.mark.parametrize("mending", [False, True])
def test_what_a_gang_misses_of_a_lane_that_has_done_its_part_is_no_first_cause(
    mending: bool, pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other lanes may still wait for it within the call, whoever else is on the way back."""
    monkeypatch.setattr(carrier_module, "PEER_SECONDS", 60.0)
    pool, ends = pool_of(0, 1)
    carrier = carrier_on(pool)
    if mending:
        lost = Mock(side_effect=LaneLost)
        carrier.mender = Mock(busy=True, epochs={}, ended=lost, news=Mock(return_value=[]))
        carrier.mender.takes.return_value = False
        carrier.mender.instead_of = lambda failed: failed
    carrier._gang_calls[4] = {0, 1}
    done = Report(CallFinished(4, 1), at=1.0)
    ends[1].send(to_bytes(Reports([done])))
    assert carrier.wait(1.0) == [done]
    echo = Report(CallFailed(4, 0, RuntimeError("connection closed by peer")), at=2.0)
    ends[0].send(to_bytes(Reports([echo])))
    closing = Timer(0.1, ends[1].close)
    closing.start()
    heard = [type(report.event) for report in carrier.wait(1.0)]
    closing.join()
    assert heard == [LaneLost, CallFailed]


def test_a_lane_on_its_way_back_is_not_waited_for_by_those_that_miss_it(pool_of: PoolOf) -> None:
    pool, ends = pool_of(0)
    carrier = carrier_on(pool)
    carrier.mender = Mock(busy=True, epochs={}, news=Mock(return_value=[]))
    carrier.mender.takes.return_value = False
    carrier.mender.instead_of = lambda failed: failed
    carrier._gang_calls[4] = {0}
    ends[0].send(to_bytes(Reports([Report(CallFailed(4, 0, PeerLost("lane 1 is gone")))])))
    receive = Mock(side_effect=pool.receive)
    pool.receive = receive
    assert len(carrier.wait(1.0)) == 1
    receive.assert_called_once()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_machine_is_waited_for_that_its_peers_have_missed_first(
    elsewhere: bool, pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link was cut: a lane missed another one seconds before the launcher did."""
    monkeypatch.setattr(carrier_module, "PEER_SECONDS", 0.0)
    pool, ends = pool_of(0, 1)
    carrier = carrier_on(pool, elsewhere)
    echo = Report(CallFailed(4, 0, PeerLost("gone: timed out")), at=1.0)
    ends[0].send(to_bytes(Reports([echo])))
    turns = 0

    def receive(seconds: float) -> Any:
        nonlocal turns
        turns += 1
        if turns == 4:
            ends[1].close()
        return LanePool.receive(pool, min(seconds, 0.01))

    monkeypatch.setattr(pool, "receive", receive)
    heard = [type(report.event) for report in carrier.wait(1.0)]
    assert heard == ([LaneLost, CallFailed] if elsewhere else [CallFailed])


@pytest.mark.parametrize("stalls", [False, True])
def test_a_lane_that_goes_on_with_what_it_was_asked_is_waited_for(
    stalls: bool, pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may wait for it, within a collective."""
    pool, _ = pool_of(0, 1)
    pool._next_number, clock = 0, Clock()
    monkeypatch.setattr(pool_module, "time", clock)
    said = deque[tuple[float, Any]]([(8.0, GoesOn(1)), (8.0, GoesOn(1)), (8.0, GoesOn(7))])
    if not stalls:
        said += [(1.0, MethodResult(1, b"a")), (0.5, MethodResult(2, b"b"))]

    def receive(seconds: float) -> Any:
        after, message = said.popleft() if said else (seconds, None)
        clock.now += min(after, seconds)
        return [] if message is None else pool._heard(0, message)

    pool.receive = receive
    orders = {lane: lambda number: CallMethod(number, "learner", "save", b"") for lane in (0, 1)}
    if stalls:
        with pytest.raises(RunFailed, match=r"lanes \[0, 1\] have not answered within 10 s"):
            pool.ask_all(orders, 10.0)
        assert clock.now == 26.0
    else:
        assert [one.value for one in pool.ask_all(orders, 10.0).values()] == [b"a", b"b"]


@pytest.mark.parametrize("number", [-1, float("nan"), "1", None])
def test_a_pool_of_no_number_is_refused_before_anything_starts(number: Any) -> None:
    for key in ("lanes_per_process", "spares", "start_seconds"):
        with pytest.raises(UserError, match=rf"^{key}: .*; expected "):
            LanePool([LaneSpec(0)], **{key: number})


def test_nothing_is_heard_of_a_lane_that_was_given_up_while_it_was_up(
    pool_of: PoolOf, tmp_path: Path
) -> None:
    """Its worker had lost a process of its own; that the lane ended later was a KeyError."""
    pool, ends = pool_of(0, 1)
    held: list[Any] = []
    serving = {1: "there"}
    pool.lanes, pool.missing, pool._folder = (LaneSpec(0), LaneSpec(1)), {}, tmp_path
    pool.exchange = SimpleNamespace(forget=lambda lane: None)
    at = dict.fromkeys((0, 1), SimpleNamespace(node="here"))
    pool.processes = SimpleNamespace(
        node="here", lanes=pool.lanes, addresses=at, hold=held.append,
        known_end=lambda lane, seconds=0.0: serving[lane], give_up=serving.pop,
    )  # fmt: skip
    pool.lost = {1: ("its engine's process has ended", 0.0)}
    pool.give_up([1])
    ends[1].close()
    assert pool.receive(0.1) == []
    assert (pool.lost, pool.spoiled, len(held)) == ({}, None, 1)


def test_what_comes_after_the_end_wakes_nobody(pool_of: PoolOf) -> None:
    pool, _ = pool_of(0)
    pool._waker.close()
    pool.wake()
