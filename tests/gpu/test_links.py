"""Links between processes on real GPUs; skipped where there are none."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from m2flow.runtime.transport.cuda_ipc import devices_here
from m2flow.runtime.transport.measure import measure
from m2flow.runtime.transport.peering import PeerAddress
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import SharedPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

KEY = b"of this test"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def payload(device: str) -> dict[str, Any]:
    base = torch.arange(1 << 20, device=device)
    return {
        "large": base.float(),
        "half": base[:1000].to(torch.bfloat16),
        "strided": base[:12].view(3, 4).t(),
        "within": base.float()[1 << 19 :],
        "one": torch.tensor(7, device=device),
        "none": torch.empty(0, 3, device=device),
        "host": torch.arange(100_000),
        "text": "said",
    }


def _holder(connection: Connection, gpu: int) -> None:
    torch.cuda.set_device(gpu)
    device = f"cuda:{gpu}"
    pool = SharedPool(f"m2flow-test-{os.getpid()}-")
    devices = devices_here(gpu)

    def provide(key: str) -> Any:
        if key == "in use":
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()
            return torch.cuda.memory_allocated(gpu)
        if key == "queued":  # the work is not over when the answer is sent
            value = torch.zeros(1 << 22, device=device)
            for _ in range(200):
                value += 1
            return {"value": value}
        return payload(device)

    server = PayloadServer(provide, pool, KEY, name="the holder", devices=devices)
    connection.send(server.address)
    connection.poll(None)
    server.close()
    pool.close()


def started(gpu: int) -> Iterator[tuple[Peers, PeerAddress]]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_holder, args=(there, gpu), daemon=True)
    process.start()
    assert here.poll(120), "the other process did not start"
    peers = Peers(None, KEY, name="the asker", devices=devices_here())
    yield peers, here.recv()
    peers.close()
    here.close()
    process.join(60)
    process.kill()


@pytest.fixture
def beside() -> Iterator[tuple[Peers, PeerAddress]]:
    """A holder on the same GPU."""
    yield from started(0)


@pytest.fixture
def across() -> Iterator[tuple[Peers, PeerAddress]]:
    """A holder on another GPU of this machine."""
    yield from started(1)


def check(peers: Peers, address: PeerAddress, found: str) -> None:
    expected = payload("cpu")
    for _ in range(3):
        got = peers.receive(address, "all", timeout=60, device="cuda:0")
        assert got.link == found
        for name, value in expected.items():
            arrived = got.value[name]
            if not isinstance(value, torch.Tensor):
                assert arrived == value
                continue
            assert arrived.device.type == ("cpu" if name == "host" else "cuda"), name
            assert arrived.dtype is value.dtype
            assert torch.equal(arrived.cpu(), value), name
    queued = peers.fetch(address, "queued", timeout=60, device="cuda:0")
    assert bool((queued["value"] == 200).all()), "it waits for the sender's stream"


def test_memory_of_the_same_gpu_is_opened(beside: tuple[Peers, PeerAddress]) -> None:
    check(*beside, "cuda_ipc")


def test_host_memory_is_the_way_round(beside: tuple[Peers, PeerAddress]) -> None:
    _, address = beside
    peers = Peers(None, KEY, name="one without CUDA IPC")
    check(peers, address, "shared")
    peers.close()


def test_the_sender_has_its_memory_back_when_the_receiver_is_done(
    beside: tuple[Peers, PeerAddress],
) -> None:
    peers, address = beside
    before = peers.fetch(address, "in use", timeout=60)
    got = peers.fetch(address, "all", timeout=60)
    assert peers.fetch(address, "in use", timeout=60) > before
    del got
    assert peers.fetch(address, "in use", timeout=60) <= before


def test_an_offer_that_is_refused_leaves_nothing(beside: tuple[Peers, PeerAddress]) -> None:
    peers, address = beside
    before = peers.fetch(address, "in use", timeout=60)
    assert peers.devices is not None
    ipc: Any = peers.devices

    def cannot(handle: Any) -> Any:
        raise RuntimeError("invalid resource handle")

    ipc.open = cannot
    got = peers.receive(address, "all", timeout=60, device="cuda:0")
    assert got.link == "shared"
    assert torch.equal(got.value["large"].cpu(), payload("cpu")["large"])
    del got
    assert peers.fetch(address, "in use", timeout=60) <= before


@two_gpus
def test_memory_of_another_gpu_is_copied(across: tuple[Peers, PeerAddress]) -> None:
    check(*across, "cuda_ipc")


def test_the_table_has_the_links(beside: tuple[Peers, PeerAddress]) -> None:
    peers, address = beside
    table = measure(peers, address)
    assert table.costs["gpu"].keys() == {"cuda_ipc"}
