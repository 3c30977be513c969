"""Payloads arrive whole by every link, and a failure is clear and heard of at once."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.errors import UserError
from m2flow.flow.batch import Batch, Ragged
from m2flow.runtime.transport import listening
from m2flow.runtime.transport import peers as peers_module
from m2flow.runtime.transport.frame import Frame, FrameStream
from m2flow.runtime.transport.handshake import KeyRefused
from m2flow.runtime.transport.listening import ListenerAddress
from m2flow.runtime.transport.peering import FrameKind, PeerAddress, PeerLost, TestPayload
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import SharedPool, sweep
from m2flow.runtime.transport.wire import UnsendableError
from tests.patience import LONG, SOON
from tests.runtime.transport.no_descriptors import DescriptorsFail, descriptors_fail

__all__ = ["descriptors_fail"]

KEY = b"between us"

BATCH = Batch(
    {
        "tokens": Ragged(torch.arange(5), [2, 0, 3]),
        "logits": torch.arange(12.0).view(4, 3).t().to(torch.bfloat16),
        "large": torch.arange(3 * 50_000).view(3, -1),
        "text": ["a", "b", "c"],
        "nothing": torch.zeros(3, 0),
    },
    [4, 7, 9],
)


def provide(key: Any) -> Any:
    match key:
        case "batch":
            return BATCH
        case "user error":
            raise UserError("column has the wrong length", key="reward", value=3)
        case "odd error":
            raise OddError(1, 2)
        case "lock":
            return {"held": threading.Lock()}
        case int():
            return torch.full((key,), key)
    raise KeyError(key)


class OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    prefix = f"m2flow-test-{os.getpid()}-{random.randrange(1 << 30)}-"
    pool = SharedPool(prefix, max_bytes=32 << 20)
    yield pool
    pool.close()
    assert not list(Path("/dev/shm").glob(prefix + "*"))


@pytest.fixture
def server(pool: SharedPool) -> Iterator[PayloadServer]:
    server = PayloadServer(provide, pool, KEY)
    yield server
    server.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers(None, KEY)
    yield peers
    peers.close()


@pytest.fixture
def far() -> Iterator[Peers]:
    """Asks over TCP, as from another node."""
    peers = Peers("elsewhere", KEY)
    yield peers
    peers.close()


def is_the_batch(got: Any) -> bool:
    return (
        got.ids == BATCH.ids
        and [row.tolist() for row in got["tokens"]] == [[0, 1], [], [2, 3, 4]]
        and torch.equal(got["logits"], BATCH["logits"])
        and torch.equal(got["large"], BATCH["large"])
        and got["text"] == ["a", "b", "c"]
        and got["nothing"].shape == (3, 0)
    )


def test_every_link_carries_every_kind_of_column(
    server: PayloadServer, peers: Peers, far: Peers
) -> None:
    for who, link in ((peers, "shared"), (far, "stream")):
        received = who.receive(server.address, "batch", timeout=SOON)
        assert is_the_batch(received.value)
        assert received.link == link


def test_the_answering_side_picks_the_link_by_size(
    server: PayloadServer, peers: Peers, far: Peers
) -> None:
    def link(who: Peers, count: int) -> str:
        return who.receive(server.address, count, timeout=SOON).link

    assert (link(peers, 10), link(peers, 1_000_000)) == ("stream", "shared")
    assert (link(far, 10), link(far, 1_000_000)) == ("stream", "stream")


def test_shared_payloads_give_their_blocks_back(
    server: PayloadServer, peers: Peers, pool: SharedPool
) -> None:
    value = peers.fetch(server.address, "batch", timeout=SOON)
    column = value["large"]
    del value
    assert pool.blocks_in_use() == 1
    assert column[2, 0] == 100_000
    del column
    assert pool.blocks_in_use() == 0


def test_a_value_made_in_the_pool_reaches_the_peer_without_a_copy(pool: SharedPool) -> None:
    made = pool.empty((100_000,))
    made[:] = 1
    server = PayloadServer(lambda key: {"x": made}, pool, KEY)
    peers = Peers(None, KEY)
    got = peers.fetch(server.address, "x", timeout=SOON)
    made[5] = 7
    assert got["x"][5] == 7
    peers.close()
    server.close()


def test_a_full_pool_is_streamed_instead(server: PayloadServer, peers: Peers) -> None:
    held = peers.fetch(server.address, TestPayload(30 << 20), timeout=SOON)
    got = peers.receive(server.address, TestPayload(20 << 20), timeout=SOON)
    assert got.link == "stream"
    assert len(held) == 30 << 20


def test_without_a_pool_payloads_are_streamed(peers: Peers) -> None:
    bare = PayloadServer(provide, None, KEY)
    received = peers.receive(bare.address, "batch", timeout=SOON)
    assert is_the_batch(received.value)
    assert received.link == "stream"
    bare.close()


def test_errors_come_back_as_themselves(server: PayloadServer, peers: Peers) -> None:
    with pytest.raises(UserError, match="reward: column has the wrong length") as caught:
        peers.fetch(server.address, "user error", timeout=SOON)
    assert caught.value.key == "reward"
    assert "in provide" in caught.value.__notes__[0]
    with pytest.raises(KeyError, match="unheard of"):
        peers.fetch(server.address, "unheard of", timeout=SOON)
    with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        peers.fetch(server.address, "odd error", timeout=SOON)
    with pytest.raises(UnsendableError, match=r"dict\['held'\].*_thread.lock"):
        peers.fetch(server.address, "lock", timeout=SOON)
    with pytest.raises(UnsendableError, match="lock"):
        peers.fetch(server.address, threading.Lock(), timeout=SOON)
    assert peers.fetch(server.address, 3, timeout=SOON).tolist() == [3, 3, 3]


def test_a_timeout_leaves_the_peer_usable_and_nothing_held(
    pool: SharedPool, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is made when the timeout has been reported: nobody waits for it, nobody reads it,
    and its block of shared memory is free again."""
    reported, taken_back = threading.Event(), threading.Event()

    def provide_late(key: Any) -> Any:
        if key != "late":
            return provide(key)
        assert reported.wait(LONG)
        return torch.ones(1_000_000)

    server = PayloadServer(provide_late, pool, KEY)
    take_back = server._take_back

    def noted(held: Any) -> None:
        assert held.handle is not None, "it had a block"
        take_back(held)
        taken_back.set()

    monkeypatch.setattr(server, "_take_back", noted)
    kept = peers.fetch(server.address, "batch", timeout=SOON)
    with pytest.raises(TimeoutError, match="no answer about 'late'"):
        peers.fetch(server.address, "late", timeout=0.1)
    assert peers.fetch(server.address, 2, timeout=SOON).tolist() == [2, 2]
    reported.set()
    assert taken_back.wait(SOON), "the answer that nobody read is still held"
    assert pool.blocks_in_use() == 1
    assert is_the_batch(kept)
    server.close()


def test_a_peer_that_says_nothing_meets_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says how long it may take, connecting takes as long as `LONG` here."""
    for function in (listening.connect, listening.prove):
        monkeypatch.setitem(function.__kwdefaults__, "seconds", LONG)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = PeerAddress("nowhere", ListenerAddress("", listener.getsockname()))
        with pytest.raises(TimeoutError, match=r"did not answer in 0\.2 s"):
            Peers("elsewhere", KEY).fetch(silent, 1, timeout=0.2)


class Dripping:
    """A connection on which one byte of a message comes a second, by a clock of its own."""

    def __init__(self, message: bytes) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._bytes = iter(message)

    def clock(self) -> float:
        return self.now

    def settimeout(self, seconds: float) -> None:
        self.waits.append(seconds)

    def recv_into(self, room: memoryview) -> int:
        self.now += 1.0
        room[0] = next(self._bytes)
        return 1


def test_a_message_that_drips_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the whole does not."""
    line = Dripping(b"".join(Frame("answer", b"head", [bytes(400)]).pieces()))
    here, there = socket.socketpair()
    receiver = FrameStream(here)
    monkeypatch.setattr(receiver, "clock", line.clock)
    monkeypatch.setattr(receiver, "_socket", line)
    receiver.deadline = 5.0
    with pytest.raises(TimeoutError):
        receiver.receive()
    assert line.waits == [5.0, 4.0, 3.0, 2.0, 1.0], "never longer than what is left of it"
    for one in (here, there):
        one.close()


def test_a_wrong_key_is_refused_on_both_sides(server: PayloadServer) -> None:
    with pytest.raises(KeyRefused):
        Peers(None, b"another").fetch(server.address, 1, timeout=SOON)
    with pytest.raises(KeyRefused):
        Peers("elsewhere", b"").fetch(server.address, 1, timeout=SOON)


def test_a_closed_peer_is_lost_for_good(server: PayloadServer, peers: Peers) -> None:
    peers.fetch(server.address, 1, timeout=SOON)
    server.close()
    with pytest.raises(PeerLost):
        peers.fetch(server.address, 1, timeout=SOON)
    with pytest.raises(PeerLost, match="lost before"):
        peers.fetch(server.address, 1, timeout=SOON)
    with pytest.raises(PeerLost, match="refused"):
        Peers(None, KEY).fetch(server.address, 1, timeout=SOON)


def test_many_threads_fetch_at_once(server: PayloadServer, peers: Peers, pool: SharedPool) -> None:
    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(30):
            count = chance.choice([1, 5, 20_000, 70_000])
            got = peers.fetch(server.address, count, timeout=SOON)
            assert got.shape == (count,)
            assert (got == count).all()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert pool.blocks_in_use() == 0


def _lane(connection: Any, hold: bool) -> None:
    """Serves until told to end; or takes a shared payload and holds it."""
    if hold:
        address, keep_connection = connection.recv()
        peers = Peers(None, KEY)
        value = peers.fetch(address, "batch", timeout=SOON)
        if not keep_connection:
            peers.close()
        connection.send(float(value["large"].sum()))
        connection.recv()
        return

    def provide_or_hang(key: Any) -> Any:
        if key == "never":
            connection.send("asked")
            threading.Event().wait()
        return provide(key)

    pool = SharedPool(f"m2flow-test-{os.getpid()}-")
    server = PayloadServer(provide_or_hang, pool, KEY)
    connection.send(server.address)
    connection.recv()
    server.close()
    pool.close()


@pytest.fixture
def start() -> Iterator[Any]:
    started = []

    def start(*, hold: bool) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_lane, args=(there, hold))
        process.start()
        started.append(process)
        return process, here

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_killed_peer_is_lost_long_before_the_deadline(
    start: Any, peers: Peers, far: Peers
) -> None:
    """Whoever waits for its answer hears of its end, and whoever asks it afterwards."""
    process, pipe = start(hold=False)
    address = pipe.recv()
    kept = peers.fetch(address, "batch", timeout=SOON)
    assert far.fetch(address, 1, timeout=SOON).tolist() == [1]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(peers.fetch, address, "never", timeout=LONG)
        assert pipe.recv() == "asked"
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"is gone"):
            waiting.result(LONG)
        with pytest.raises(PeerLost):
            far.fetch(address, 1, timeout=LONG)
    assert is_the_batch(kept), "what was read stays"
    assert sweep(f"m2flow-test-{process.pid}-") > 0


@pytest.mark.parametrize("keep_connection", [True, False])
def test_what_a_killed_reader_held_comes_back(
    start: Any, server: PayloadServer, pool: SharedPool, keep_connection: bool
) -> None:
    process, pipe = start(hold=True)
    pipe.send((server.address, keep_connection))
    assert pipe.recv() == float(BATCH["large"].sum())
    time.sleep(0.05)
    assert pool.blocks_in_use() == 1
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if not keep_connection:  # nobody heard: it is found dead when someone else comes
        Peers(None, KEY).fetch(server.address, 1, timeout=SOON)
    deadline = time.monotonic() + SOON
    while pool.blocks_in_use():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("why", [None, errno.ENOSYS, errno.EMFILE])
def test_peers_meet_where_processes_have_no_descriptors(
    start: Any,
    server: PayloadServer,
    pool: SharedPool,
    peers: Peers,
    descriptors_fail: DescriptorsFail,
    why: int | None,
) -> None:
    """Every run on lanes failed in such an interpreter or sandbox: the peer was lost for good."""
    descriptors_fail(why)
    for size in (10, 1_000_000):
        assert peers.fetch(server.address, size, timeout=SOON).tolist() == [size] * size
    assert pool.blocks_in_use() == 0
    process, pipe = start(hold=True)
    pipe.send((server.address, True))
    assert pipe.recv() == float(BATCH["large"].sum())
    assert pool.blocks_in_use() == 1
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    deadline = time.monotonic() + SOON
    while pool.blocks_in_use():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_use_of_a_pair_takes_one_connection_and_nothing_more(
    start: Any, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greeting goes with the first request, and neither is answered on its own. Its time is held
    by `benchmarks/links.py`."""
    done: list[str] = []
    here = threading.get_ident()

    def noted(of: object, name: str, say: Callable[..., str]) -> None:
        real = getattr(of, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == here:
                done.append(say(*arguments))
            return real(*arguments, **named)

        monkeypatch.setattr(of, name, call)

    noted(peers_module, "connect", lambda *_: "connect")
    noted(FrameStream, "send", lambda _, frame: f"send {frame.kind}")
    noted(FrameStream, "receive", lambda _: "receive")
    noted(time, "sleep", lambda seconds: f"sleep {seconds}")
    _, pipe = start(hold=False)
    address = pipe.recv()
    exchange = [f"send {FrameKind.REQUEST}", "receive"]
    done.clear()
    peers.fetch(address, 10, timeout=SOON)
    assert done == ["connect", f"send {FrameKind.HELLO}", *exchange]
    done.clear()
    peers.fetch(address, 10, timeout=SOON)
    assert done == exchange
    pipe.send("end")


@pytest.mark.parametrize(("key", "timeout"), [(threading.Lock(), SOON), ("batch", 0.0)])
def test_a_request_that_was_never_sent_takes_nothing_back(
    server: PayloadServer, peers: Peers, pool: SharedPool, key: Any, timeout: float
) -> None:
    """What was read before on the same connection was free, and written over."""
    kept = peers.fetch(server.address, "batch", timeout=SOON)
    with pytest.raises((UnsendableError, TimeoutError)):
        peers.fetch(server.address, key, timeout=timeout)
    deadline = time.monotonic() + SOON
    while server._listener._let_in:  # until the server has heard the farewell
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pool.blocks_in_use() == 1
    assert is_the_batch(kept)
