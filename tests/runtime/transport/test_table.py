"""The table of links: what it predicts, what it picks, and that measuring it is quick."""

from __future__ import annotations

import io
import json
import math
import os
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from m2flow.runtime.lane.exchange import reference_cost
from m2flow.runtime.transport.measure import measure
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import SharedPool
from m2flow.runtime.transport.table import SCOPES, LinkTable, TransferCost

costs = st.builds(
    TransferCost,
    st.floats(1e-6, 1e-1),
    st.floats(1e6, 1e12) | st.just(math.inf),
)
tables = st.builds(
    LinkTable,
    st.dictionaries(
        st.sampled_from(SCOPES),
        st.dictionaries(st.sampled_from(["shared", "stream", "object"]), costs),
    ),
    st.booleans(),
)


@given(tables)
def test_json_has_every_entry_and_no_infinity(table: LinkTable) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads(table.to_json(), parse_constant=refuse)
    for scope, kinds in table.costs.items():
        for kind, cost in kinds.items():
            rate = read["costs"][scope][kind]["bytes_per_second"]
            assert cost.bytes_per_second == (math.inf if rate is None else rate)


@given(tables, st.sampled_from(SCOPES), st.integers(0, 1 << 33))
def test_the_choice_is_never_slower_than_another(table: LinkTable, scope, nbytes: int) -> None:
    choice = table.choose(scope, nbytes)
    if choice is None:
        assert table.kinds(scope) == ()
        return
    least = min(table.seconds(scope, kind, nbytes) for kind in table.kinds(scope))
    assert table.seconds(scope, choice, nbytes) == least


def test_small_ones_by_latency_and_large_ones_by_rate() -> None:
    table = LinkTable(
        {"node": {"stream": TransferCost(50e-6, 1e9), "shared": TransferCost(100e-6, math.inf)}}
    )
    assert table.choose("node", 1_000) == "stream"
    assert table.choose("node", 1_000_000) == "shared"
    assert table.choose("node", 1_000_000, {"stream"}) == "stream"
    assert table.choose("cluster", 1) is None
    assert table.seconds("node", "stream", 1_000_000) == pytest.approx(1.05e-3)


def test_a_cost_goes_through_what_was_measured() -> None:
    cost = TransferCost.fitted({1_000: 10e-6, 1_000_000: 500e-6, 2_001_000: 1010e-6})
    assert cost.latency_seconds == 10e-6
    assert cost.bytes_per_second == pytest.approx(2e9)
    assert TransferCost.fitted({1: 10e-6, 100: 9e-6}).bytes_per_second == math.inf


def test_merging_prefers_the_other() -> None:
    table = LinkTable.assumed().merged(LinkTable({"node": {"shared": TransferCost(1.0)}}))
    assert table.seconds("node", "shared", 0) == 1.0
    assert table.kinds("node") == ("stream", "shared")
    assert not table.measured


def test_the_printed_table_names_every_link() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(LinkTable.assumed().render())
    text = out.getvalue()
    assert "assumed" in text
    for word in ("reference", "shared", "stream", "cuda_ipc", "not copied", "10 GB/s", "80 us"):
        assert word in text, text


def test_measuring_a_node_and_a_cluster() -> None:
    pool = SharedPool(f"m2flow-test-{os.getpid()}-table-")
    near = PayloadServer(lambda key: torch.ones(1), pool, b"key", node="here")
    other = PayloadServer(lambda key: torch.ones(1), None, b"key", node="there")
    peers = Peers("here", b"key")
    started = time.monotonic()
    table = measure(peers, [near.address, near.address, other.address])
    taken = time.monotonic() - started
    assert table.measured
    assert set(table.kinds("node")) == {"stream", "shared"}
    assert table.kinds("cluster") == ("stream",)
    assert table.choose("node", 16 << 20) == "shared"
    assert taken < 3  # 0.2 s on a machine with nothing else to do
    for part in (peers, near, other, pool):
        part.close()


def test_by_reference_costs_next_to_nothing() -> None:
    assert reference_cost().seconds(1 << 40) < 1e-3
