"""Workers with a process of their own: their interpreter, their environment, their crash."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed
from m2flow.flow.worker import Isolation
from m2flow.runtime.driver.launch import Run
from m2flow.runtime.transport import lines
from tests.patience import LONG, SOON
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS = 4
LANE = LaneSpec(0, cores=(0,))


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with local_cluster(1):
        yield


class Neighbour(Worker):
    """Says where it runs."""

    @stage
    def look(self, batch: Batch) -> Batch:
        return batch

    def facts(self) -> dict[str, object]:
        return {
            "process": os.getpid(),
            "python": sys.executable,
            "prefix": sys.prefix,
            "cores": os.sched_getaffinity(0),
            "variable": os.environ.get("M2FLOW_TEST_SIMULATOR"),
        }


class Simulator(Neighbour):
    """Crashes, as simulators do, on an item of 100 or more."""

    def __init__(self, python: str | None = None) -> None:
        self.isolation = Isolation(python, (("M2FLOW_TEST_SIMULATOR", "headless"),))

    @stage
    def simulate(self, batch: Batch) -> Batch:
        if int(batch["x"].max()) >= 100:
            os._exit(7)
        return batch.with_columns(x=batch["x"] + 1)


class Simulation(Flow):
    simulator: Simulator
    neighbour: Neighbour

    def step(self, items: Stream) -> Stream:
        return self.simulator.simulate(self.neighbour.look(items))


def start(python: str | None = None) -> Run:
    flow = Simulation(simulator=Simulator(python), neighbour=Neighbour())
    return m2flow.launch(
        flow, items_per_step=ITEMS, mode="collocated", lanes=(LANE,), lane_restarts=0
    )


def batch(first: int) -> Batch:
    return Batch({"x": torch.arange(first, first + ITEMS)})


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_crash_ends_the_run_and_not_the_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is another one on the same cores, with its own variables, until it crashes.

    Its end is heard of at once: neither by its silence nor by the deadline of its call.
    """
    monkeypatch.setattr(lines, "SILENCE_SECONDS", LONG)
    run = start()
    assert run.plan.deadline_seconds >= 600, "longer than this test may take"
    assert run.step(batch(0)).output["x"].tolist() == [1, 2, 3, 4]
    own, beside = (run.worker_call(name, "facts") for name in ("simulator", "neighbour"))
    assert own["process"] != beside["process"]
    assert own["cores"] == beside["cores"]
    assert (own["variable"], beside["variable"]) == ("headless", None)
    with run:
        with pytest.raises(RunFailed) as caught:
            run.step(batch(100))
        assert alive(beside["process"])
    deadline = time.monotonic() + SOON
    while alive(beside["process"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first, *account = str(caught.value).splitlines()
    assert first.startswith("lane 1 was lost: ")
    assert "it held simulator" in first
    assert any("running: simulator.simulate (step 1" in line for line in account)


def test_a_worker_may_have_an_interpreter_of_its_own(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Another environment, which sees the packages of this one; its path has a space."""
    folder = tmp_path_factory.mktemp("own python")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    own = str(folder / "bin" / "python")
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    ours = str(Path(m2flow.__file__).parents[1])  # it may be installed by reference
    found = [ours, *(path for path in sys.path if "packages" in path)]
    (packages / "others.pth").write_text("\n".join(found))
    with start(own) as run:
        assert run.step(batch(0)).output["x"].tolist() == [1, 2, 3, 4]
        facts = run.worker_call("simulator", "facts")
        beside = run.worker_call("neighbour", "facts")
    assert (facts["python"], facts["prefix"]) == (own, str(folder))
    assert beside["python"] != own
