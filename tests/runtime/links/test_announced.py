"""Transfers that both sides enter: in one order, within the deadline, or not at all.

Channels are those of Gloo, which wait for the other side as NCCL's do.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from m2flow.runtime.transport.announced import HOLDER, TAKER, Announced, Meeting
from m2flow.runtime.transport.devices import LinkRefused, LinkStalled, Standing
from m2flow.runtime.transport.nccl import _Works
from m2flow.runtime.transport.peers import PayloadServer, PeerLost, Peers
from m2flow.runtime.transport.table import LinkCost, LinkTable
from tests.runtime.links.fake_gpu import FakeDriver, FakeGPU

KEY = b"between us"
ANNOUNCED_WINS = LinkTable(
    {
        "gpu_cluster": {"nccl": LinkCost(1e-6), "staged": LinkCost(1.0)},
        "cluster": {"stream": LinkCost(1e-3, 1e9)},
    }
)


class GlooChannels:
    """Channels in host memory.

    Attributes:
        deaf: whether a side joins, and then takes part in nothing.
        unable: what joining fails with, if anything.
    """

    def __init__(self) -> None:
        self.deaf = False
        self.unable: str | None = None
        self.joined = 0

    def open(self) -> tuple[Meeting, Any]:
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        return Meeting("127.0.0.1", store.port), store

    def join(self, meeting: Meeting, store: Any, rank: int, seconds: float) -> GlooChannel:
        if self.unable is not None:
            raise RuntimeError(self.unable)
        timeout = timedelta(seconds=30)
        if store is None:
            store = TCPStore(meeting.host, meeting.port, 2, is_master=False, timeout=timeout)
        self.joined += 1
        if self.deaf:
            return GlooChannel(None)
        return GlooChannel(ProcessGroupGloo(store, rank, 2, timeout))

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class GlooChannel:
    def __init__(self, group: Any) -> None:
        self.group = group
        self.aborted = False

    def send(self, pieces: Sequence[Tensor]) -> Callable[[float], bool]:
        if self.group is None:
            return lambda seconds: bool(time.sleep(seconds))
        return waits([self.group.send([piece], TAKER, 0) for piece in pieces])

    def receive(self, pieces: Sequence[Tensor]) -> Callable[[float], bool]:
        if self.group is None:
            return lambda seconds: bool(time.sleep(seconds))
        return waits([self.group.recv([piece], HOLDER, 0) for piece in pieces])

    def abort(self) -> None:
        self.aborted = True


def waits(works: Sequence[Any]) -> Callable[[float], bool]:
    over = threading.Event()

    def wait() -> None:
        for work in works:
            work.wait()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    return over.wait


class Lane:
    """One process on a machine of its own, with a server and who asks."""

    def __init__(self, name: str) -> None:
        self.channels = GlooChannels()
        standing = Standing(name, name, f"GPU of {name}")
        self.link = Announced("nccl", standing, self.channels)
        self.gpu = FakeGPU(f"GPU of {name}", FakeDriver(), nccl=self.link)
        self.values: dict[int, Any] = {}
        self.server = PayloadServer(
            self.values.__getitem__,
            None,
            KEY,
            node=name,
            name=name,
            devices=self.gpu.devices,
            table=ANNOUNCED_WINS,
        )
        self.peers = Peers(name, KEY, name=name, devices=self.gpu.devices)

    def offers(self, *numbers: int) -> None:
        for number in numbers:
            large = torch.full((400_000,), number)
            value = {"large": self.gpu.put(large), "few": self.gpu.put(large[:3]), "n": number}
            self.values[number] = value

    def get(self, other: Lane, number: int, seconds: float = 10) -> str:
        got = self.peers.receive(other.server.address, number, timeout=seconds)
        value = got.value
        assert value["n"] == number
        assert torch.equal(value["few"], torch.full((3,), number))
        assert bool((value["large"] == number).all())
        return got.link

    def close(self) -> None:
        self.peers.close()
        self.server.close()
        self.gpu.devices.close()


@pytest.fixture
def lanes() -> Iterator[tuple[Lane, Lane]]:
    pair = Lane("lane 0"), Lane("lane 1")
    yield pair
    for lane in pair:
        lane.close()


def test_payloads_between_machines_are_sent_and_received(lanes: tuple[Lane, Lane]) -> None:
    here, there = lanes
    there.offers(1, 2)
    assert here.get(there, 1) == "nccl"
    assert here.get(there, 2) == "nccl"
    assert (here.channels.joined, there.channels.joined) == (1, 1), "a channel is kept"
    assert not there.link._waiting


def test_many_threads_in_both_directions_do_not_wait_for_each_other_for_ever(
    lanes: tuple[Lane, Lane],
) -> None:
    """Threads overtake each other between the grant and the transfer; the order holds."""
    here, there = lanes
    for lane in lanes:
        lane.offers(*range(40))
    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        one = [threads.submit(here.get, there, number) for number in range(40)]
        other = [threads.submit(there.get, here, number) for number in range(40)]
        assert {done.result(30) for done in (*one, *other)} == {"nccl"}
    assert time.monotonic() - began < 20
    assert not here.link._waiting
    assert not there.link._waiting


def test_a_stall_ends_at_the_deadline_and_names_both(lanes: tuple[Lane, Lane]) -> None:
    here, there = lanes
    there.offers(1, 2)
    there.channels.deaf = here.channels.deaf = True
    began = time.monotonic()
    with pytest.raises(LinkStalled, match="nccl from lane 1 to lane 0 stalled"):
        here.get(there, 1, seconds=0.5)
    assert 0.4 < time.monotonic() - began < 2
    assert here.get(there, 2) == "stream", "later ones go by host memory"


def test_a_channel_that_nobody_can_join_is_done_without(lanes: tuple[Lane, Lane]) -> None:
    here, there = lanes
    there.offers(1, 2)
    here.channels.unable = "no such network\nand more"
    assert here.get(there, 1) == "stream"
    (why,) = here.peers.refused[there.server.address].values()
    assert why == "nccl from lane 1 to lane 0 failed: no such network"
    assert here.get(there, 2) == "stream"
    assert "no nccl from lane 1 to lane 0" in there.server.table.refused[0]


def test_a_holder_that_cannot_join_says_so(lanes: tuple[Lane, Lane]) -> None:
    here, there = lanes
    there.offers(1, 2)
    there.channels.unable = "no such network"
    here.channels.deaf = True
    began = time.monotonic()
    assert here.get(there, 1, seconds=60) == "stream"
    assert time.monotonic() - began < 5
    (why,) = here.peers.refused[there.server.address].values()
    assert "no such network" in why
    assert here.get(there, 2) == "stream"


def test_a_holder_that_dies_in_a_transfer_is_lost_at_once(lanes: tuple[Lane, Lane]) -> None:
    here, there = lanes
    there.offers(1)
    there.channels.deaf = here.channels.deaf = True
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(here.get, there, 1, 60)
        time.sleep(0.3)
        there.server.close()
        began = time.monotonic()
        with pytest.raises(PeerLost):
            waiting.result(10)
    assert time.monotonic() - began < 2


def test_a_taker_that_dies_leaves_the_holder_free(lanes: tuple[Lane, Lane]) -> None:
    here, there = lanes
    there.offers(1)
    there.channels.deaf = True
    original = here.peers._connection
    wires: list[Any] = []

    def connection(*args: Any, **more: Any) -> Any:
        wires.append(original(*args, **more))
        return wires[-1]

    here.peers._connection = connection  # type: ignore[method-assign]
    here.channels.deaf = True
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(here.get, there, 1, 60)
        time.sleep(0.3)
        wires[0]._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLost):
            waiting.result(10)
    ((_, end),) = there.link._out.values()
    deadline = time.monotonic() + 5
    while end.broken is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "broke off" in end.broken


def test_an_offer_that_is_not_taken_up_waits_no_longer_than_its_request(
    lanes: tuple[Lane, Lane],
) -> None:
    here, there = lanes
    there.offers(1, 2)
    here.link.take = refuse  # type: ignore[method-assign]
    assert here.get(there, 1) == "stream"
    assert not there.link._waiting


def refuse(*_: Any) -> Any:
    raise LinkRefused("not here")


class Work:
    """A transfer that is over after so many looks."""

    def __init__(self, looks: int, error: str | None = None) -> None:
        self.looks, self.error, self.waited = looks, error, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True
        if self.error:
            raise RuntimeError(self.error)


def test_waiting_for_the_device_has_an_end() -> None:
    work, slow = Work(3), Work(10**9)
    assert _Works([work], [torch.ones(1)])(5.0)
    assert work.waited
    began = time.monotonic()
    assert not _Works([slow], [])(0.05)
    assert time.monotonic() - began < 0.5
    assert not slow.waited
    with pytest.raises(RuntimeError, match="remote"):
        _Works([Work(0, "remote process exited")], [])(1.0)
