"""Lanes: from text to lane specifications, and what the machine has to say about them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import PlanError, UserError
from m2flow.plan import (
    LaneSpec,
    Plan,
    check_machine,
    machine,
    parse_lanes,
    with_memory,
)
from m2flow.plan import lanes as lanes_module
from m2flow.plan.machine import available_cores
from tests.plan.machines import lanes_on


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.sets(st.integers(0, 99), min_size=1, max_size=12), st.data())
def test_lanes_share_all_cores_evenly(cores: set[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(cores)))
    lanes = lanes_on(f"cpu:{count}", cores=sorted(cores))
    assert [lane.id for lane in lanes] == list(range(count))
    assert sorted(core for lane in lanes for core in lane.cores) == sorted(cores)
    sizes = {len(lane.cores) for lane in lanes}
    assert max(sizes) - min(sizes) <= 1
    assert {(lane.kind, lane.gpu) for lane in lanes} == {("cpu", None)}


def test_a_lane_for_each_accelerator() -> None:
    lanes = lanes_on(" gpu:2 ", cores=(4, 5, 6), num_gpus=3)
    assert lanes == (
        LaneSpec(0, "gpu", cores=(4, 6), gpu=0),
        LaneSpec(1, "gpu", cores=(5,), gpu=1),
    )


def test_auto_takes_the_accelerators_or_else_the_cores() -> None:
    assert lanes_on("auto", (0, 1), 1) == lanes_on("gpu:1", (0, 1), 1)
    assert lanes_on("auto", (0, 1), 0) == lanes_on("cpu:2", (0, 1), 0)


def test_a_lane_of_an_accelerator_may_take_its_share_of_the_memory() -> None:
    sizes = (80_000_000_000, 24_000_000_000)
    lanes = lanes_on("gpu:2", (0, 1), 2, sizes)
    assert [lane.memory_bytes for lane in lanes] == [72_000_000_000, 21_600_000_000]
    several = lanes_on("2xgpu:1", (0, 1), 2, sizes)
    assert [lane.memory_bytes for lane in several] == [72_000_000_000, 72_000_000_000]
    assert [lane.memory_bytes for lane in lanes_on("gpu:2", (0, 1), 2)] == [None, None]
    assert lanes_on("cpu:1", (0, 1), 2, sizes)[0].memory_bytes is None
    assert {lane.memory_bytes for lane in with_memory(lanes, 7)} == {7}, "unless it is said"


SMI = """#!/bin/sh
case "$1" in
  *index,uuid,memory.total*) printf '0, GPU-aa11, 81559\n1, GPU-bb22, 24564\n' ;;
esac
"""


@pytest.mark.parametrize(
    ("chosen", "sizes"),
    [
        (None, (81559 << 20, 24564 << 20)),
        ("1", (24564 << 20,)),
        ("1,0", (24564 << 20, 81559 << 20)),
        ("GPU-bb", (24564 << 20,)),
        ("1,-1,0", (24564 << 20,)),  # CUDA reads no further than what is no device
        ("MIG-77", ()),  # a part of one: its memory is another
        ("", ()),
    ],
)
def test_the_driver_tells_how_much_memory_there_is(
    chosen: str | None, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lanes may take once was nobody's limit, and nothing ever made way on an accelerator."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text(SMI)
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert machine.gpu_memory() == sizes
    if sizes:
        monkeypatch.setattr(lanes_module, "visible_gpus", lambda: len(sizes))
        lane = parse_lanes(f"gpu:{len(sizes)}")[0]
        assert lane.memory_bytes == int(0.9 * sizes[0])


def test_a_driver_that_does_not_say_sets_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpu_memory() == ()
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '0, GPU-aa11, [N/A]'\n")
    driver.chmod(0o755)
    assert machine.gpu_memory() == ()


def test_lanes_of_several_machines() -> None:
    assert lanes_on("2xcpu:2", (4, 7, 9), 0) == (
        LaneSpec(0, cores=(4, 9)),
        LaneSpec(1, cores=(7,)),
        LaneSpec(2, cores=(0, 2), node=1),  # as many cores as here, numbered from 0
        LaneSpec(3, cores=(1,), node=1),
    )
    assert lanes_on("1xcpu:2", (0, 1), 0) == lanes_on("cpu:2", (0, 1), 0)
    lanes = lanes_on("4xgpu:8", range(4), 8)
    assert [(lane.id, lane.node, lane.gpu) for lane in lanes] == [
        (node * 8 + gpu, node, gpu) for node in range(4) for gpu in range(8)
    ]
    assert all(lane.cores for lane in lanes if lane.node)  # more lanes than cores here


def test_the_first_of_several_machines_is_this_one() -> None:
    with pytest.raises(UserError, match=r"more lanes than.*'2xcpu:3'.*at most cpu:2"):
        lanes_on("2xcpu:3", (0, 1), 0)


def test_a_limit_for_each_lane() -> None:
    lanes = with_memory(lanes_on("2xcpu:1", (0, 1), 0), 200)
    assert [lane.memory_bytes for lane in lanes] == [200, 200]


def test_other_machines_refuse_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "available_cores", lambda: (0,))
    monkeypatch.setattr(lanes_module, "visible_gpus", lambda: 0)
    check_machine(
        Plan("custom", (LaneSpec(0, cores=(0,)), LaneSpec(1, "gpu", (9,), 5, node=1)), {})
    )


TEXTS = [
    "",
    "2",
    "cpu",
    "cpu:",
    "cpu:0",
    "cpu:-1",
    "cpu:two",
    "tpu:1",
    "0xcpu:1",
    "xcpu:1",
    "2xauto",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_names_no_lanes(text: str) -> None:
    with pytest.raises(UserError, match=r"lanes: is not a lane specification.*such as cpu:2"):
        lanes_on(text, (0, 1), 0)


def test_more_than_the_machine_has() -> None:
    with pytest.raises(UserError, match=r"more lanes than.*'cpu:3'.*at most cpu:2.*doctor"):
        lanes_on("cpu:3", (0, 1), 0)
    with pytest.raises(UserError, match=r"'gpu:1'.*no gpu lane, as there is none"):
        lanes_on("gpu:1", (0, 1), 0)


def test_check_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "available_cores", lambda: (0, 1))
    monkeypatch.setattr(lanes_module, "visible_gpus", lambda: 1)
    check_machine(Plan("custom", (LaneSpec(0, cores=(1,)), LaneSpec(1, "gpu", gpu=0)), {}))
    with pytest.raises(PlanError, match=r"lane 3 is bound to cores.*\[7\].*some of \[0, 1\]"):
        check_machine(Plan("custom", (LaneSpec(3, cores=(1, 7)),), {}))
    with pytest.raises(PlanError, match=r"lane 4 wants an accelerator.*got 1.*less than 1"):
        check_machine(Plan("custom", (LaneSpec(4, "gpu", gpu=1),), {}))


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,1", 2),
        ("GPU-a, GPU-b,", 2),
        ("0,-1,1", 1),
        ("0,,1", 1),
        ("NoDevFiles", 0),
    ],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.visible_gpus() == count


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A machine of eight cores whose control groups are files of the test: (proc, cgroup)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(machine.usable_cores, "__defaults__", (proc, cgroup))
    return proc, cgroup


@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [
        ("max 100000", "max 100000", 8),
        ("250000 100000", "max 100000", 2),
        ("max 100000", "300000 100000", 3),
        ("500000 100000", "400000 100000", 4),
        ("50000 100000", "max 100000", 1),
        ("9900000 100000", "max 100000", 8),
    ],
)
def test_quota_version_2(system: tuple[Path, Path], own: str, above: str, cores: int) -> None:
    proc, cgroup = system
    write(proc / "self" / "cgroup", "0::/a/b\n")
    write(cgroup / "a" / "b" / "cpu.max", own)
    write(cgroup / "a" / "cpu.max", above)
    assert available_cores() == tuple(range(cores))


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("200000", 2), ("10000", 1)])
def test_quota_version_1(system: tuple[Path, Path], quota: str, cores: int) -> None:
    proc, cgroup = system
    write(proc / "self" / "cgroup", "5:memory:/box\n4:cpu,cpuacct:/box\n")
    write(cgroup / "cpu" / "box" / "cpu.cfs_quota_us", quota)
    write(cgroup / "cpu" / "box" / "cpu.cfs_period_us", "100000")
    assert available_cores() == tuple(range(cores))


def test_no_control_groups(system: tuple[Path, Path]) -> None:
    assert available_cores() == tuple(range(8))
