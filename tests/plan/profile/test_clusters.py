"""Clusters: from text to lanes, and what is said where a text is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.plan.profile.clusters import lane_specs, parse_cluster
from m2flow.plan.profile.hardware import DEVICES

PARTS = st.tuples(st.integers(1, 20), st.integers(1, 16), st.sampled_from(sorted(DEVICES)))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_a_cluster_reads_back_as_it_is_written(parts: list[tuple[int, int, str]]) -> None:
    text = "+".join(f"{nodes}x{lanes}x{name}" for nodes, lanes, name in parts)
    cluster = parse_cluster(text)
    assert str(cluster) == text
    assert parse_cluster(text.lower()) == cluster
    lanes = lane_specs(cluster)
    assert [lane.id for lane in lanes] == list(range(cluster.num_lanes))
    assert len({lane.node for lane in lanes}) == sum(nodes for nodes, _, _ in parts)
    assert {lane.kind for lane in lanes} == set(cluster.kinds)
    assert sum(map(cluster.lanes_of, cluster.kinds)) == cluster.num_lanes
    devices = [part.device for part in cluster.machines for _ in range(part.num_lanes)]
    for lane, device in zip(lanes, devices, strict=True):
        assert cluster.kinds[lane.kind].name == device.name
        assert (lane.gpu is None) == (device.kind == "cpu")
        assert lane.memory_bytes == device.usable_bytes


def test_one_machine_needs_no_count() -> None:
    assert parse_cluster("8xH100") == parse_cluster("1x8xH100")


def test_kinds_are_told_apart_only_where_they_differ() -> None:
    assert set(parse_cluster("16x8xH100").kinds) == {"gpu"}
    assert set(parse_cluster("1x8xH100+1x32xCPU").kinds) == {"gpu", "cpu"}
    assert set(parse_cluster("2x8xH100+1x16xL40S").kinds) == {"h100", "l40s"}


def test_a_collective_stays_on_the_machine_that_the_text_describes() -> None:
    (device,) = parse_cluster("1x16xL40S").kinds.values()
    assert device.lanes_per_node == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "16x8xH100"),
        ("16x8", "not machines x devices x name"),
        ("H100x8", "did you mean '1x8xH100'"),
        ("gpu:8", "did you mean '1x8xgpu'"),
        ("0x8xH100", "has no lane"),
        ("1x0xH100", "has no lane"),
        ("-1x8xH100", "not machines"),
        ("1x8xH100+", "not machines"),
        ("1x8xH1000", "H100"),
        ("1x8xTPU", "cluster"),
        ("2x8x8xH100", "not machines"),
        ("16385xH100", "too many lanes (got '16385xH100'); expected 16384 at most"),
    ],
)
def test_what_is_no_cluster_is_said_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_cluster(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
