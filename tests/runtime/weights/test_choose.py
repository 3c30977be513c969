"""The choice follows the figures, and says them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.runtime.transport.table import LinkCost, LinkTable
from m2flow.runtime.weights.buckets import ALIGNMENT, pack
from m2flow.runtime.weights.choose import Publish, choose
from m2flow.runtime.weights.rates import Rates

LINKS = LinkTable(
    {
        "gpu": {"cuda_ipc": LinkCost(50e-6)},
        "node": {"inline": LinkCost(100e-6, 0.5e9), "shared": LinkCost(50e-6, 10e9)},
        "cluster": {"stream": LinkCost(10e-3, 50e6)},
    }
)
MODEL = Publish(200_000_000, {"node": 1})
FAR = replace(MODEL, targets={"cluster": 1})


def test_on_one_lane_and_one_node_memory_is_shared():
    lane = choose(replace(MODEL, targets={"lane": 1}), LINKS)
    assert (lane.method, lane.predicted_seconds) == ("shared", 0.0)
    node = choose(replace(MODEL, targets={"node": 3}), LINKS)
    assert node.method == "shared"
    assert node.predicted_seconds == pytest.approx(0.2 / 8 + 3 * 50e-6)
    assert choose(replace(MODEL, exported=True), LINKS).predicted_seconds == pytest.approx(50e-6)


def test_over_a_thin_wire_a_delta_goes_if_little_has_changed():
    assert choose(FAR, LINKS).method == "copy"
    assert choose(replace(FAR, fraction_changed=0.9), LINKS).method == "copy"
    sparse = choose(replace(FAR, fraction_changed=0.01), LINKS)
    assert sparse.method == "delta"
    assert sparse.predicted_seconds < 0.3
    assert choose(replace(FAR, fraction_changed=0.01, delta=False), LINKS).method == "copy"


def test_many_far_targets_get_a_broadcast():
    many = replace(FAR, targets={"cluster": 8}, group=True)
    assert choose(many, LINKS).method == "broadcast"
    assert choose(replace(many, targets={"cluster": 1}), LINKS).method == "copy"
    ring, tree = choose(replace(many, tree=False), LINKS), choose(many, LINKS)
    assert ring.predicted_seconds < tree.predicted_seconds
    assert choose(replace(many, whole=False), LINKS).method == "copy"


def test_the_reckoning_is_shown():
    lines = choose(replace(FAR, fraction_changed=0.01), LINKS).explain().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("* delta")
    assert "1.00% changed" in lines[0]
    assert any("no process group" in line and " no " in line for line in lines)
    assert any("1 of the targets on other nodes" in line for line in lines)
    assert "nothing measured" in choose(FAR, LINKS).explain()


@given(
    st.dictionaries(
        st.sampled_from(["lane", "gpu", "node", "cluster"]), st.integers(1, 9), min_size=1
    ),
    st.none() | st.floats(0, 1),
    st.booleans(),
    st.booleans(),
)
def test_the_choice_is_the_least_of_what_can_be_had(targets, fraction, group, exported):
    publish = Publish(
        10_000_000, targets, fraction_changed=fraction, group=group, exported=exported
    )
    choice = choose(publish, LINKS)
    seconds = [way.seconds for way in choice.reasons if way.seconds is not None]
    assert choice.predicted_seconds == min(seconds) >= 0
    assert {way.method for way in choice.reasons} == {"shared", "copy", "broadcast", "delta"}
    assert choice.explain().count("*") == 1


def test_rates_are_measured():
    rates = Rates.measure(num_bytes=1 << 20)
    assert min(rates.copy, rates.compare, rates.checksum) > 1e7


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(ALIGNMENT, 200))
def test_buckets_hold_every_byte_once(sizes, bucket_bytes):
    buckets = pack(sizes, bucket_bytes)
    seen = [[] for _ in sizes]
    for bucket in buckets:
        assert 0 < bucket.num_bytes <= bucket_bytes
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset % ALIGNMENT == 0
            end = slot.offset + slot.num_bytes
            seen[slot.tensor] += range(slot.start, slot.start + slot.num_bytes)
        assert end == bucket.num_bytes
    assert seen == [list(range(size)) for size in sizes]
