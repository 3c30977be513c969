"""Channels between real processes and threads, and what is left when some of them are killed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from m2flow.flow.batch import Batch, Ragged
from m2flow.runtime.transport.channel import Channel, ChannelLost
from m2flow.runtime.transport.frame import Frame
from tests.runtime.transport.strangers import SOON, check_nobody_waits, patient_listeners

__all__ = ["patient_listeners"]

SPAWN = multiprocessing.get_context("spawn")
Start = Callable[..., BaseProcess]


@pytest.fixture
def channel() -> Iterator[Channel]:
    with Channel("orders", max_items=8, timeout=SOON) as channel:
        yield channel


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process, which is killed at the end of the test if it still runs."""
    processes: list[BaseProcess] = []

    def begin(target: Callable[..., object], *args: object) -> BaseProcess:
        process = SPAWN.Process(target=target, args=args)
        process.start()
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.join()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def handle_to(channel: Channel, **changed: Any) -> Channel:
    """A handle with a changed address."""
    handle: Channel = pickle.loads(pickle.dumps(channel))
    handle._address = dataclasses.replace(channel._address, **changed)
    return handle


# --- processes ------------------------------------------------------------------------------------


def test_a_handle_works_in_another_process(channel: Channel, start: Start) -> None:
    process = start(channel.put, {"tokens": [1, 2, 3]}, 3.0, "ready")
    assert channel.get("ready") == {"tokens": [1, 2, 3]}
    process.join(SOON)
    assert process.exitcode == 0
    assert channel.stats().taken == 1


def test_an_item_outlives_the_process_that_put_it(start: Start) -> None:
    with Channel(max_items=8) as channel:
        process = start(channel.put, torch.arange(200_000))
        process.join(SOON)
        assert torch.equal(channel.get(timeout=0), torch.arange(200_000))


def test_a_getter_killed_while_it_waits_swallows_nothing(start: Start) -> None:
    with Channel(max_items=8, timeout=SOON) as channel:
        process = start(channel.get)
        eventually(lambda: channel.stats().waiting_getters == 1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        channel.put("still here")
        assert channel.get(timeout=SOON) == "still here"


def test_a_getter_stopped_before_it_could_read_gives_the_item_back(start: Start) -> None:
    """The item is in its socket when it dies: delivered, but never had."""
    with Channel(max_items=8, timeout=SOON) as channel:
        process = start(channel.get)
        eventually(lambda: channel.stats().waiting_getters == 1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        channel.put("first")
        channel.put("second")
        assert channel.stats().items == 1
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        eventually(lambda: channel.stats().items == 2)
        assert channel.get_batch(max_items=2) == ["first", "second"]


def test_a_putter_killed_while_it_waits_leaves_no_item(start: Start) -> None:
    with Channel(max_items=1, timeout=SOON) as channel:
        channel.put("first")
        process = start(channel.put, "orphan")
        eventually(lambda: channel.stats().waiting_putters == 1)
        process.kill()
        eventually(lambda: channel.stats().waiting_putters == 0)
        assert channel.get() == "first"
        assert channel.stats().items == 0


def test_a_host_that_is_gone_is_named_at_once() -> None:
    channel = Channel("gone")
    elsewhere = pickle.loads(pickle.dumps(channel))
    elsewhere.put(1)
    channel.terminate()
    with pytest.raises(ChannelLost, match=r"'gone'.*cannot be reached"):
        elsewhere.get()
    with pytest.raises(ChannelLost, match=r"'gone'.*cannot be reached"):
        elsewhere.get()


def test_whoever_waits_is_told_when_the_host_ends() -> None:
    channel = Channel("ends", timeout=SOON)
    elsewhere = pickle.loads(pickle.dumps(channel))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(elsewhere.get)
        eventually(lambda: channel.stats().waiting_getters == 1)
        channel.terminate()
        with pytest.raises(ChannelLost):
            waiting.result(SOON)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_makes_connections_of_its_own() -> None:
    with Channel(timeout=SOON) as channel:
        channel.put("before")  # so that a connection is there to be inherited
        pid = os.fork()
        if pid == 0:
            try:
                listener = channel._end.__self__._listener  # type: ignore[union-attr]
                sockets = (*listener._sockets, *listener._let_in)
                closed = all(each.fileno() < 0 for each in sockets)
                channel.put((channel.get() + " and after", closed), key="answer")
            finally:
                os._exit(0)
        # The child has let go of the host's sockets: they end when their host does.
        assert channel.get("answer") == ("before and after", True)
        os.waitpid(pid, 0)


def test_a_handle_with_another_secret_is_not_let_in() -> None:
    with Channel("guarded") as channel:
        with pytest.raises(ChannelLost, match="somebody else"):
            handle_to(channel, secret=b"guess").get()
        assert "secret" not in repr(channel._address)
        channel.put(1)
        assert channel.get() == 1


def test_another_machine_comes_in_over_the_network() -> None:
    with Channel("far", listen="127.0.0.1", timeout=SOON) as channel:
        handle = handle_to(channel, machine="another")
        handle.put(torch.ones(300_000))
        assert handle.get().sum() == 300_000
        handle.terminate()
        nowhere = channel._address.endpoint._replace(tcp=None)
        with pytest.raises(ChannelLost, match="listen=ADDRESS"):
            handle_to(channel, machine="another", endpoint=nowhere).get()


# --- threads --------------------------------------------------------------------------------------


def test_threads_share_a_handle_and_nothing_is_lost_or_doubled(channel: Channel) -> None:
    per_thread, threads = 60, 3
    with concurrent.futures.ThreadPoolExecutor(2 * threads) as pool:
        makers = [
            pool.submit(lambda n: [channel.put((n, i)) for i in range(per_thread)], n)
            for n in range(threads)
        ]
        takers = [pool.submit(lambda: list(channel)) for _ in range(threads)]
        concurrent.futures.wait(makers)
        channel.close()
        taken = [taker.result(SOON) for taker in takers]
    assert sorted(item for items in taken for item in items) == [
        (n, i) for n in range(threads) for i in range(per_thread)
    ]
    for items in taken:  # what one taker gets from one maker is in order
        for n in range(threads):
            mine = [i for maker, i in items if maker == n]
            assert mine == sorted(mine)


# --- what comes out is what went in ---------------------------------------------------------------


def test_nested_tensors_arrive_as_they_were(channel: Channel) -> None:
    batch = Batch(
        {
            "tokens": Ragged.from_rows([torch.arange(3), torch.arange(0), torch.arange(5)]),
            "logprob": torch.randn(3, 4, dtype=torch.float64),
            "text": ["a", "", "ü"],
        }
    )
    half = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
    channel.put({"batch": batch, "parts": (half, torch.empty(0, 3), None)})
    got = channel.get()
    assert torch.equal(got["batch"]["logprob"], batch["logprob"])
    assert torch.equal(got["batch"]["tokens"].values, batch["tokens"].values)
    assert got["batch"]["text"] == batch["text"]
    assert torch.equal(got["parts"][0], half)
    assert got["parts"][1].shape == (0, 3)
    got["parts"][0].add_(1)  # it is the getter's own


def test_large_items_go_through_in_pieces() -> None:
    with Channel(max_bytes=64 << 20) as channel:
        tensors = [torch.randint(0, 9, (n,)) for n in (1, 8_000, 8_192, 300_000, 2_000_000)]
        for tensor in tensors:
            channel.put(tensor)
        assert all(
            torch.equal(*pair) for pair in zip(channel.get_batch(max_items=5), tensors, strict=True)
        )


def test_a_slow_reader_does_not_hold_up_others() -> None:
    """One that has asked for a large item and does not read it."""
    with Channel(timeout=SOON) as channel:
        channel.put(b"x" * (8 << 20))
        slow = pickle.loads(pickle.dumps(channel))._connection()
        asked = {"key": None, "timeout": SOON, "weight": 1.0, "max_items": 1, "linger": SOON}
        slow.send(Frame("get", pickle.dumps(asked)))
        eventually(lambda: channel.stats().items == 0)
        channel.put("next")
        assert channel.get(timeout=SOON) == "next"
        slow.close()
        assert len(channel.get(timeout=SOON)) == 8 << 20


@pytest.mark.usefixtures("patient_listeners")
def test_strangers_hold_up_nobody(channel: Channel) -> None:
    """Whoever has a handle puts and gets beside them, on a connection of its own."""

    def knock() -> socket.socket:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect("\0" + channel._address.endpoint.unix)
        return stranger

    def visit() -> None:
        handle = pickle.loads(pickle.dumps(channel))
        handle.put("order")
        assert handle.get() == "order"

    check_nobody_waits(visit, knock)
    assert channel.stats().items == 0


def test_a_wait_may_be_longer_than_the_system_polls_at_once() -> None:
    """Some weeks are too many milliseconds for it."""
    with Channel("patient", timeout=1e7) as channel:
        later = threading.Timer(0.3, channel.put, (1,))
        later.start()
        assert channel.get() == 1
        later.join(SOON)


@pytest.mark.parametrize("seconds", [1e10, 1e300])
def test_any_wait_that_is_finite_can_be_waited(seconds: float) -> None:
    """The first one was an OverflowError."""
    with Channel("patient", timeout=seconds) as channel:
        channel.put(1)
        assert channel.get() == 1
        channel.put(2, timeout=seconds)
        assert channel.get(timeout=seconds) == 2
