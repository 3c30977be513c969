"""Which GPU a lane sees, with GPUs that Ray only believes in; and what lanes leave behind."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed, UserError
from m2flow.flow.batch import Batch
from m2flow.flow.worker import Isolation
from m2flow.plan import machine
from m2flow.runtime.driver.placing import gpus_beside
from m2flow.runtime.driver.pool import LanePool, _clear_machine
from m2flow.runtime.driver.processes import LaneProcesses
from m2flow.runtime.driver.stalled import _LaneProcessAt, accounts_here
from m2flow.runtime.lane import actor
from m2flow.runtime.lane.exchange import SHARED_BYTES, Exchange
from m2flow.runtime.lane.stacks import STACKS

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

GPU_LANES = (
    LaneSpec(0, "gpu", gpu=1),
    LaneSpec(1, "gpu", gpu=0),
    LaneSpec(2, "gpu", gpu=1, reserved_for="simulator"),
    LaneSpec(3, "gpu", gpu=0, reserved_for="renderer"),
)


def test_a_reserved_lane_shares_the_gpu_of_the_lane_beside_it() -> None:
    assert gpus_beside(GPU_LANES) == {2: 0, 3: 1}
    assert gpus_beside(GPU_LANES[::-1]) == {2: 0, 3: 1}
    alone = (LaneSpec(0, reserved_for="a"), LaneSpec(1, "gpu", gpu=0, reserved_for="a"))
    assert gpus_beside(alone) == {}, "where none is beside it, it owns the GPU"
    two = (*alone, LaneSpec(2, "gpu", gpu=0, reserved_for="b"))
    assert gpus_beside(two) == {2: 1}
    elsewhere = (LaneSpec(0, "gpu", gpu=0), LaneSpec(1, "gpu", gpu=0, node=1, reserved_for="a"))
    assert gpus_beside(elsewhere) == {}


@pytest.fixture(params=["", "1"])
def _two_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a Ray that tells each process which GPUs to use, and of one that has been told not to."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", request.param)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = Path(tempfile.mkdtemp(prefix="m2f-"))
    try:
        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=2,
            include_dashboard=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def uses(_: object) -> str | None:
    """Which GPUs CUDA would use in this process; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("_two_gpus")
def test_lanes_that_share_a_gpu_see_the_same_one() -> None:
    own = {"renderer": Isolation(None, (("CUDA_VISIBLE_DEVICES", "7"),))}
    with LanePool(GPU_LANES, own) as pool:
        asked = [pool.processes.actors[lane].visible_gpus.remote() for lane in range(4)]
        first, second, *reserved = ray.get(asked, timeout=30)
        assert {first, second} == {"0", "1"}
        assert reserved == [first, "7"], "what its worker says goes first"
        actors = [pool.processes.actors[lane] for lane in range(4)]
        calls = [actor.__ray_call__.options(concurrency_group="objects") for actor in actors]
        used = [call.remote(uses) for call in calls]
        assert ray.get(used, timeout=30) == [first, second, *reserved]
        assert pool.measure_links().costs.keys() == {"node"}, "torch sees no GPU"
    with pytest.raises(UserError, match="the lanes need 3 GPUs, the Ray cluster has 2 free"):
        LanePool((*GPU_LANES, LaneSpec(4, "gpu", gpu=2)), own)


def test_a_lane_on_another_machine_has_its_folder_in_the_temporary_folder_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR of the launcher, such as one of its job, need not be a folder there."""
    monkeypatch.setattr(actor, "leave_the_end_to_the_parent", lambda: None)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    processes = LaneProcesses.__new__(LaneProcesses)
    processes.node, processes._folder = "here", "/tmp/of-the-job/m2flow-some"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    there = tmp_path / "m2flow-some"
    for node, folder in (("here", Path(processes._folder)), ("there", there)):
        told = processes._folder_on(node)
        assert actor.LaneProcess(LaneSpec(0), 0, told, b"", None).folder == folder
    with monkeypatch.context() as patch:  # somebody else was there first
        patch.setattr(sys, "setswitchinterval", lambda _: None)
        there.symlink_to(tmp_path)
        with pytest.raises(RunFailed, match="is no folder that this user alone can enter"):
            actor.LaneProcess(LaneSpec(0), 0, there.name, b"", None).ready()
        there.unlink()
    there.mkdir()
    stacks = there / STACKS.format(0)
    stacks.touch()
    monkeypatch.setattr(os, "kill", lambda *_: stacks.write_text("its stacks"))
    assert "its stacks" in accounts_here(there.name, [_LaneProcessAt(0, 0, os.getpid())])[0]
    _clear_machine(there.name)
    assert not there.exists()


@pytest.mark.parametrize(
    ("quota", "bound"), [("max", [{2, 3}]), ("800000", [{2, 3}]), ("750000", []), ("200000", [])]
)
def test_a_lane_is_bound_to_no_cores_where_a_quota_gives_less_than_there_are(
    quota: str, bound: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All containers of a machine ran on its first cores."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text(f"{quota} 100000")
    monkeypatch.setattr(machine.usable_cores, "__defaults__", (tmp_path, tmp_path))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    set_to = list[set[int]]()
    monkeypatch.setattr(actor, "leave_the_end_to_the_parent", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: set_to.append(set(cores)))
    lane = actor.LaneProcess(LaneSpec(0, cores=(2, 3)), 0, "m2flow-some", b"", None)
    lane._bind()
    assert set_to == bound
    assert lane.num_threads == 2


def test_what_a_killed_lane_left_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / f"m2flow-test-{os.getpid()}"
    folder.mkdir()
    (folder / "lane-0.line").touch()
    left = Path("/dev/shm") / f"{folder.name}-0-left"
    other = Path("/dev/shm") / f"{folder.name}0-another-pool"
    left.touch()
    other.touch()
    try:
        _clear_machine(str(folder))
        assert not left.exists()
        assert not folder.exists()
        assert other.exists()
    finally:
        left.unlink(missing_ok=True)
        other.unlink()


def test_what_was_wrapped_for_a_lane_comes_back_when_it_is_lost(tmp_path: Path) -> None:
    exchange = Exchange(None, -1, "here", "127.0.0.1", tmp_path, b"key")
    batch = Batch({"x": torch.zeros(2, SHARED_BYTES)})
    for lane in (3, 3, 4):
        exchange.wrap(batch, lane, same_node=True)
    assert exchange._pool.blocks_in_use() == 3
    exchange.forget(3)
    assert exchange._pool.blocks_in_use() == 1
    exchange.close()
