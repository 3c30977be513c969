"""The table of links: what it predicts, what it picks, and that measuring it asks for little."""

from __future__ import annotations

import io
import json
import os
from collections import Counter

import pytest
import torch
from rich.console import Console

from m2flow.plan.file import to_json
from m2flow.runtime.transport import measure as measuring
from m2flow.runtime.transport.listening import ListenerAddress
from m2flow.runtime.transport.measure import (
    LARGE,
    MESSAGE,
    MOST_REPEATS,
    SECONDS_PER_SIZE,
    measure,
)
from m2flow.runtime.transport.peering import PeerAddress, TestPayload
from m2flow.runtime.transport.peers import Peers, Received
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import SharedPool
from m2flow.runtime.transport.table import ASSUMED, BETWEEN, LinkTable, TransferCost, way
from tests.clock import Clock


def test_what_fits_into_a_message_goes_with_it() -> None:
    ways = {scope: (way(scope, 1_000), way(scope, 1_000_000)) for scope in BETWEEN}
    assert ways == {
        "gpu": ("cuda_ipc", "cuda_ipc"),
        "gpus": ("cuda_ipc", "cuda_ipc"),
        "node": ("stream", "shared"),
        "cluster": ("stream", "stream"),
    }


def test_the_cost_of_the_way_that_is_taken() -> None:
    assert ASSUMED.taken("node", 1 << 20) == ASSUMED.costs["node"]["shared"]
    assert ASSUMED.taken("gpu", 1) is None
    assert TransferCost(50e-6, 1e9).seconds(1_000_000) == pytest.approx(1.05e-3)


def test_a_cost_goes_through_what_was_measured() -> None:
    cost = TransferCost.fitted((1_000, 10e-6), (2_001_000, 1010e-6))
    assert cost.latency_seconds == 10e-6
    assert cost.bytes_per_second == pytest.approx(2e9)
    assert TransferCost.fitted((1, 10e-6), (100, 9e-6)).bytes_per_second is None


def test_the_printed_table_names_every_link() -> None:
    out = io.StringIO()
    gpu = LinkTable({"gpu": {"cuda_ipc": TransferCost(1e-6)}})
    Console(file=out, width=120).print(ASSUMED.merged(gpu).render())
    text = out.getvalue()
    for word in ("cuda_ipc", "shared", "stream", "not copied", "10 GB/s", "80.7 us"):
        assert word in text, text


def test_a_rate_without_bound_is_null_in_json() -> None:
    text = to_json(LinkTable({"gpu": {"cuda_ipc": TransferCost(1e-6)}}))
    cost = {"latency_seconds": 1e-6, "bytes_per_second": None}
    assert json.loads(text) == {"costs": {"gpu": {"cuda_ipc": cost}}}


def test_measuring_a_node_and_a_cluster() -> None:
    pool = SharedPool(f"m2flow-test-{os.getpid()}-table-")
    near = PayloadServer(lambda key: torch.ones(1), pool, b"key", node="here")
    other = PayloadServer(lambda key: torch.ones(1), None, b"key", node="there")
    peers = Peers("here", b"key")
    table = measure(peers, near.address).merged(measure(peers, other.address))
    assert table.costs["node"].keys() == {"stream", "shared"}
    assert table.costs["cluster"].keys() == {"stream"}
    for part in (peers, near, other, pool):
        part.close()


@pytest.mark.parametrize(("node", "sizes"), [("here", 4), ("there", 2)])
@pytest.mark.parametrize(
    ("seconds", "times"),
    [(0.0, 1 + MOST_REPEATS), (1.0, 1 + 3), (4.0, 1 + 1)],
)
def test_a_size_is_transferred_no_oftener_than_its_time_allows(
    seconds: float, times: int, node: str, sizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once to warm and once at least, then until its time is over, which is 3 s here; the larger of
    two once more, to see its way."""
    clock, asked = Clock(), Counter[int]()

    def receive(_: PeerAddress, key: TestPayload, **__: object) -> Received:
        clock.now += seconds
        asked[key.nbytes] += 1
        return Received(None, "stream" if key.nbytes <= MESSAGE else "shared")

    peers = Peers("here", b"key")
    monkeypatch.setattr(peers, "receive", receive)
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(measuring, "SECONDS_PER_SIZE", 3.0)
    (costs,) = measure(peers, PeerAddress(node, ListenerAddress(""))).costs.values()
    assert sorted(asked.values()) == [times] * (sizes // 2) + [times + 1] * (sizes // 2)
    assert max(asked) == LARGE
    assert {cost.latency_seconds for cost in costs.values()} == {seconds}
    assert 0 < SECONDS_PER_SIZE <= 0.1
