"""What goes wrong on lanes: the first cause is on top at once, and nothing is left over."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import PlanError, RunFailed, UserError
from m2flow.runtime.driver.launch import Run
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.transport import lines
from m2flow.runtime.transport.sweeping import clear_up
from tests.patience import LONG, SOON
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS = 4
LANES = tuple(LaneSpec(number) for number in range(2))
LARGE = 1 << 20
"""Elements of a row: so large a payload goes through shared memory."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with local_cluster(len(LANES)):
        yield


@pytest.fixture(scope="module")
def pool(_cluster: None) -> Iterator[LanePool]:
    """For whatever leaves the lanes as they are."""
    with LanePool(LANES) as lanes:
        yield lanes


class Maker(Worker):
    """Makes large items; a wrong one or none where it is told to."""

    def __init__(self, fault: str = "", folder: str = "") -> None:
        self.fault, self.folder = fault, folder

    def load(self, place: Place) -> None:
        super().load(place)
        if self.fault == "load":
            wait_for(lambda: any(Path(self.folder).iterdir()))
            (Path(self.folder) / str(os.getpid())).touch()
            raise FileNotFoundError("no model here")

    @stage
    def make(self, batch: Batch) -> Batch:
        if self.fault == "items":
            return batch.select([0])
        if self.fault == "column":
            return batch.with_columns(y=torch.zeros(len(batch) + 1))
        return batch.with_columns(y=torch.ones(len(batch), LARGE))

    @stage(streaming=True)
    def stream(self, batch: Batch) -> Generator[Batch, Batch | None, None]:
        if self.fault == "streamed column":
            yield batch.with_columns(y=torch.zeros(len(batch) + 1))
        if self.fault != "streamed items":
            yield batch


class Reader(Worker):
    """Reads them; before that, it waits for a file if it is told to."""

    def __init__(self, fault: str = "", folder: str = "") -> None:
        self.fault, self.folder = fault, folder

    def load(self, place: Place) -> None:
        super().load(place)
        if self.fault == "slow load":
            (Path(self.folder) / str(os.getpid())).touch()
            time.sleep(LONG)

    @stage
    def read(self, batch: Batch) -> Batch:
        if self.fault == "sleep":
            (Path(self.folder) / "reading").touch()
            time.sleep(LONG)
        return batch.with_columns(y=batch["y"].sum(1) if "y" in batch else batch["x"])


class Making(Flow):
    maker: Maker
    reader: Reader

    def step(self, items: Stream) -> Stream:
        return self.reader.read(self.maker.make(self.maker.stream(items)))


def start(maker: str = "", reader: str = "", folder: Path | str = "", **settings: object) -> Run:
    flow = Making(maker=Maker(maker, str(folder)), reader=Reader(reader, str(folder)))
    if "mode" not in settings:
        spots = {"maker": Placement(((0,),)), "reader": Placement(((1,),))}
        settings = {"plan": Plan("custom", LANES, spots, deadline_seconds=LONG), **settings}
    settings = {"lane_restarts": 0, **settings}
    return m2flow.launch(flow, items_per_step=ITEMS, **settings)  # type: ignore[arg-type]


def items() -> Batch:
    return Batch({"x": torch.arange(ITEMS)})


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left_over(name: str, temporary: str | None = None) -> list[str]:
    """Files of a pool in shared memory, and its folder."""
    folder = Path(temporary or tempfile.gettempdir()) / name
    shared = [str(path) for path in Path("/dev/shm").glob(f"{name}*")]
    return shared + ([str(folder)] if folder.exists() else [])


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["eager", "lanes"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("items", ["maker.make", "the wrong number of items", "got 1", f"expected {ITEMS}"]),
        ("column", ["maker.make", "y", str(ITEMS + 1)]),
        ("streamed items", ["maker.stream", f"{ITEMS} items not handed on"]),
        ("streamed column", ["maker.stream", "y", str(ITEMS + 1)]),
    ],
)
def test_a_stage_that_returns_something_wrong_is_named(
    fault: str, words: list[str], where: str, pool: LanePool
) -> None:
    settings = {"mode": "eager", "lanes": "cpu:1"} if where == "eager" else {"lanes": pool}
    with start(fault, **settings) as run, pytest.raises(UserError) as caught:
        run.step(items())
    first = str(caught.value).splitlines()[0]
    assert all(word in first for word in words), first


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(self: LanePool, *_: object, **__: object) -> None:
        raise AssertionError("lanes were started")

    monkeypatch.setattr(LanePool, "__init__", started)


@pytest.mark.usefixtures("nothing_starts")
def test_lanes_that_overlap_are_refused_before_anything_starts() -> None:
    shared = (LaneSpec(0, cores=(0, 1)), LaneSpec(1, cores=(1,)))
    with pytest.raises(PlanError, match=r"lanes: lanes \[0, 1\] overlap on core 1"):
        start(mode="collocated", lanes=shared)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("mode", ["collocated", "eager"])
@pytest.mark.parametrize("lane", [LaneSpec(0, "gpu"), LaneSpec(0, gpu=0)], ids=["gpu", "cpu"])
def test_a_lane_whose_device_its_kind_belies_is_refused_before_anything_starts(
    lane: LaneSpec, mode: str
) -> None:
    with pytest.raises(PlanError, match=r"lanes: lane 0 of kind .*accelerator"):
        start(mode=mode, lanes=(lane,))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("spots", "words"),
    [
        ({"maker": ((0, 1),), "reader": ((0,),)}, "placements.maker: maker.stream streams.*share"),
        ({"maker": ((0,),), "reader": ((0, 1), (2,))}, "placements.reader: .*unequal size"),
    ],
)
def test_gangs_that_cannot_work_together_are_refused_before_anything_starts(
    spots: dict[str, tuple[tuple[int, ...], ...]], words: str
) -> None:
    placements = {worker: Placement(gangs) for worker, gangs in spots.items()}
    plan = Plan("custom", tuple(map(LaneSpec, range(3))), placements)
    with pytest.raises(PlanError, match=words):
        start(mode="collocated", plan=plan)


def test_a_worker_that_cannot_load_ends_the_lanes_at_once(tmp_path: Path) -> None:
    """Even those in the middle of loading another one, which would take as long as `LONG`."""
    with pytest.raises(FileNotFoundError, match="no model here") as caught:
        start("load", "slow load", tmp_path, load_deadline_seconds=LONG)
    assert "On lane 0:" in "\n".join(caught.value.__notes__)
    processes = [int(path.name) for path in tmp_path.iterdir()]
    assert len(processes) == 2
    wait_for(lambda: not any(map(alive, processes)))


# --- losses ---------------------------------------------------------------------------------------


def test_a_worker_may_take_as_long_to_load_as_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"no progress with loading for 2 s: lane 1 \(reader\)"):
        start(reader="slow load", folder=tmp_path, load_deadline_seconds=2.0)
    (process,) = tmp_path.iterdir()
    wait_for(lambda: not alive(int(process.name)))


def test_a_lane_that_is_lost_while_another_waits_for_it_is_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks it for a payload misses it first; that is not what is said. Its end is heard of
    by its line, and neither by its silence nor by a deadline."""
    monkeypatch.setattr(lines, "SILENCE_SECONDS", LONG)
    with start(folder=tmp_path) as run:
        run.step(items())
        pool = run._carrier.pool
        victim, name = pool.addresses[0].process_id, pool._folder.name
        os.kill(victim, signal.SIGSTOP)  # alive, and answering nobody
        killer = threading.Timer(1.0, os.kill, (victim, signal.SIGKILL))
        killer.start()
        with pytest.raises(RunFailed) as caught:
            run.step(items())
        killer.join()
    assert str(caught.value).startswith("lane 0 was lost: ")
    assert "it held maker" in str(caught.value)
    assert left_over(name) == []


class Gone(Maker):
    """Makes its items, and is gone before anybody has read them."""

    @stage
    def make(self, batch: Batch) -> Batch:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return batch


class Late(Reader):
    @stage
    def read(self, made: Batch, waited: Batch) -> Batch:
        return made

    @stage
    def wait(self, batch: Batch) -> Batch:
        time.sleep(1.0)
        return batch


class Losing(Flow):
    """The reader asks for the items when their maker is gone."""

    maker: Gone
    reader: Late

    def step(self, items: Stream) -> Stream:
        return self.reader.read(self.maker.make(items), self.reader.wait(items))


def test_a_payload_that_went_with_its_lane_names_the_lane() -> None:
    spots = {"maker": Placement(((0,),)), "reader": Placement(((1,),))}
    flow = Losing(maker=Gone(), reader=Late())
    plan = Plan("custom", LANES, spots)
    with (
        m2flow.launch(flow, items_per_step=ITEMS, plan=plan, lane_restarts=0) as run,
        pytest.raises(RunFailed) as caught,
    ):
        run.step(items())
    assert str(caught.value).startswith("lane 0 was lost: ")


LAUNCHER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tests.runtime.test_faults as faults
run = faults.start(reader="sleep", folder=sys.argv[2])
pool = run._carrier.pool
processes = [address.process_id for address in pool.addresses.values()]
words = " ".join(map(str, [pool._folder.name, *processes]))
Path(sys.argv[2], "part").write_text(words)
os.rename(Path(sys.argv[2], "part"), Path(sys.argv[2], "there"))
run.step(faults.items())
"""


NEXT = """
from m2flow.runtime.driver.pool import LanePool
from m2flow.plan.lanes import parse_lanes
with LanePool(parse_lanes("cpu:1")):
    pass
"""


def started(folder: Path, temporary: str) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """A launcher with a temporary folder of its own, and its environment."""
    root = Path(__file__).resolve().parents[2]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment["TMPDIR"] = temporary
    command = [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(root), str(folder)]
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    return launcher, environment


def test_after_a_whole_group_was_killed_the_next_pool_clears_up(tmp_path: Path) -> None:
    """Launcher, shell, Ray and lanes at once, as a scheduler's last kill or the kernel does it."""
    temporary = tempfile.mkdtemp(prefix="m2l-")  # Ray's sockets need a short path
    launcher, environment = started(tmp_path, temporary)
    try:
        wait_for(lambda: (tmp_path / "reading").exists() or launcher.poll() is not None)
        name, *_ = (tmp_path / "there").read_text().split()
    finally:
        launcher.send_signal(signal.SIGSTOP)
        group = [launcher, *psutil.Process(launcher.pid).children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody sees another's end
            for process in group:
                with suppress(psutil.Error):
                    process.send_signal(number)
        launcher.wait()
    try:
        wait_for(lambda: not any(alive(process.pid) for process in group))
        left = sorted(path.name for path in Path(temporary).glob("m2flow-*"))
        assert [one for one in left if "ray" not in one] == [name, f"{name}.lock"]
        assert len(left) == 4
        assert any("/dev/shm" in path for path in left_over(name, temporary))
        subprocess.run([sys.executable, "-c", NEXT], env=environment, check=True, timeout=200)
        assert left_over(name, temporary) == []
        assert list(Path(temporary).glob("m2flow-*")) == []
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for path in left_over(name):
            Path(path).unlink()


@pytest.mark.parametrize("swept", [False, True], ids=["alone", "swept by the next pool"])
def test_lanes_end_when_their_launcher_is_killed(
    swept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a call, with payloads in shared memory: all of it goes with it.

    Also where its shell is killed, and the next pool takes away what they use.
    """
    temporary = tempfile.mkdtemp(prefix="m2l-")  # Ray cannot remove its files there
    launcher, _ = started(tmp_path, temporary)
    try:
        wait_for(lambda: (tmp_path / "reading").exists() or launcher.poll() is not None)
        name, *processes = (tmp_path / "there").read_text().split()
        assert all(alive(int(process)) for process in processes)
        assert any("/dev/shm" in path for path in left_over(name, temporary))
    finally:
        children = psutil.Process(launcher.pid).children()
        shells = [one for one in children if swept and one.name() == "sh"]
        for process in (*shells, launcher):
            process.kill()
        launcher.wait()
    try:
        assert len(shells) == swept
        if swept:
            monkeypatch.setattr(tempfile, "tempdir", temporary)
            clear_up()
            assert not left_over(name, temporary)
        wait_for(lambda: not any(alive(int(process)) for process in processes))
        wait_for(lambda: not left_over(name, temporary))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
