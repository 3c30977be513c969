"""The table of links: what it predicts, what it picks, and that measuring it is quick."""

from __future__ import annotations

import io
import json
import os
import time

import pytest
import torch
from rich.console import Console

from m2flow.plan.file import to_json
from m2flow.runtime.transport.measure import measure
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import SharedPool
from m2flow.runtime.transport.table import ASSUMED, BETWEEN, LinkTable, TransferCost, way


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
    started = time.monotonic()
    table = measure(peers, near.address).merged(measure(peers, other.address))
    taken = time.monotonic() - started
    assert table.costs["node"].keys() == {"stream", "shared"}
    assert table.costs["cluster"].keys() == {"stream"}
    assert taken < 3  # 0.2 s on a machine with nothing else to do
    for part in (peers, near, other, pool):
        part.close()
