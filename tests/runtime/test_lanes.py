"""Flows on Ray lanes: every plan gives exactly the eager result, and no fault leaves it hanging.

The toy flow counts in integers, so that results can be compared without tolerance, and every
stage's output depends on the weights, so that a stale or a torn install would be seen.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import RunFailed, UserError
from m2flow.runtime.driver import placing
from m2flow.runtime.driver import processes as processes_module
from m2flow.runtime.driver.launch import Run
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.lane.actor import LaneAddress, LaneProcess
from m2flow.runtime.transport import lines as lines_module
from m2flow.runtime.transport.sweeping import Sweeper
from tests.clock import Clock
from tests.patience import LONG, SOON
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS, STEPS = 8, 4
NUM_CPUS = 4


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """One cluster for all tests; `launch` uses the connection that it finds."""
    with local_cluster(NUM_CPUS):
        yield


@pytest.fixture(scope="module")
def pool(_cluster: None) -> Iterator[LanePool]:
    """Lanes for all the runs that leave them as they are."""
    with LanePool(lanes(2)) as two:
        yield two


# --- the flow -------------------------------------------------------------------------------------


class Sampler(Worker):
    """Takes what has come after each sample; on a gang all lanes make all samples."""

    collective = True

    def __init__(self) -> None:
        self.samples, self.weight, self.version = 4, 0, 0

    @stage(streaming=True, expands="samples")
    def generate(self, prompts: Batch) -> Generator[Batch, Batch | None, None]:
        pending = prompts.repeat(self.samples)
        while len(pending):
            first = pending.select([0])
            sample = torch.tensor(first.ids) % self.samples
            y = first["x"] * 3 + sample * sample + self.weight
            version = torch.full_like(y, self.version)
            fed = yield first.with_columns(y=y, version=version)
            pending = pending.select(range(1, len(pending)))
            if fed is not None:
                more = fed.repeat(self.samples)
                pending = Batch.concat([pending, more]) if len(pending) else more

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.weight, self.version = int(weights["w"]), version


class Learner(Worker):
    def __init__(self) -> None:
        self.w = self.sum = 0

    @stage
    def logprobs(self, batch: Batch) -> Batch:
        return batch.with_columns(z=batch["y"] * 2 + self.w)

    @stage(accumulates=True, minibatches=2)
    def train(self, batch: Batch) -> None:
        ids = torch.tensor(batch.ids)
        self.sum += int((batch["a"] * (ids + 1) + batch["z"]).sum())

    @train.finish
    def train_finish(self) -> dict[str, float]:
        total = torch.tensor([self.sum])
        self.place.all_reduce([total])
        self.w, self.sum = (self.w * 7 + int(total)) % 1009, 0
        return {"total": float(total), "w": float(self.w)}

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor(self.w)}

    def state(self) -> int:
        return self.w


@stage(unit="group")
def advantages(batch: Batch) -> Batch:
    y = batch["y"].reshape(-1, 4)
    return batch.with_columns(a=(4 * y - y.sum(1, keepdim=True)).flatten())


class Training(Flow):
    sampler: Sampler
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        samples = advantages(self.sampler.generate(prompts))
        return self.learner.train(self.learner.logprobs(samples))

    def sync(self) -> None:
        self.learner.publish(self.sampler)


def training() -> Training:
    return Training(sampler=Sampler(), learner=Learner())


def prompts(step: int) -> Batch:
    return Batch({"x": torch.arange(step, step + ITEMS)})


def lanes(count: int) -> tuple[LaneSpec, ...]:
    """Lanes of one Ray CPU each, bound to cores where the machine has them."""
    return tuple(LaneSpec(number, cores=(number,)) for number in range(count))


def rows(result: StepResult) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in result.output.columns.items()}


def run_steps(run: Run) -> list[StepResult]:
    return list(run.steps(prompts(step) for step in range(STEPS)))


@pytest.fixture(scope="module")
def eager() -> list[StepResult]:
    """What one process on one thread gives, checked against arithmetic written out."""
    with m2flow.launch(training(), items_per_step=ITEMS, mode="eager", lanes="cpu:1") as run:
        results = run_steps(run)
    w = 0
    for step, result in enumerate(results):
        before = w  # log-probabilities are all taken before the first mini-batch trains
        y = [(step + k // 4) * 3 + (k % 4) ** 2 + w for k in range(ITEMS * 4)]
        assert rows(result)["y"] == y
        for half in (range(ITEMS * 2), range(ITEMS * 2, ITEMS * 4)):
            z = [rows(result)["z"][k] for k in half]
            a = [4 * y[k] - sum(y[k // 4 * 4 : k // 4 * 4 + 4]) for k in half]
            assert z == [2 * y[k] + before for k in half]
            assert [rows(result)["a"][k] for k in half] == a
            w = (w * 7 + sum(a[n] * (k + 1) + z[n] for n, k in enumerate(half))) % 1009
    return results


# --- the same result under every plan -------------------------------------------------------------

SINGLE, BOTH, GANG = ((1,),), ((0,), (1,)), ((0, 1),)


def hand_written(
    sampler: tuple[tuple[int, ...], ...],
    learner: tuple[tuple[int, ...], ...],
    chunk: int | None = None,
    max_running: int | None = None,
    max_items: Mapping[str, int] | None = None,
    **more: object,
) -> Plan:
    """A plan in which every stage but the streaming one is cut alike."""
    names = ("advantages", "learner.logprobs", "learner.train")
    return Plan(
        "custom",
        lanes(2),
        {
            "sampler": Placement(sampler),
            "learner": Placement(learner),
            "advantages": Placement(((1,),)),
        },
        {
            **dict.fromkeys(names, StagePlan(chunk=chunk)),
            "sampler.generate": StagePlan(chunk=chunk, max_running=max_running),
        },
        {name: EdgePlan(max_items=limit) for name, limit in (max_items or {}).items()},
        **more,
    )


LIMITS = {"sampler.generate->advantages": 8, "advantages->learner.logprobs": 4}

PLANS: dict[str, Plan | str] = {
    "collocated": "collocated",
    "disaggregated": "disaggregated",
    "whole windows": hand_written(((0,),), SINGLE),
    "chunks of 1": hand_written(BOTH, SINGLE, chunk=1),
    "chunks of 3": hand_written(((0,),), BOTH, chunk=3),
    "fed": hand_written(BOTH, BOTH, chunk=1, max_running=2),
    "limited": hand_written(((0,),), SINGLE, chunk=1, max_running=3, max_items=LIMITS),
    "gang": hand_written(((0,),), GANG, chunk=3),
    "gang and feeding": hand_written(BOTH, GANG, max_running=2),
    "sampling on a gang": hand_written(GANG, GANG, chunk=3),
    "a gang that is fed": hand_written(GANG, BOTH, chunk=1, max_running=2),
    "a gang in other order": hand_written(((1, 0),), SINGLE, chunk=1, max_running=3),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_gives_the_eager_result(
    name: str, eager: list[StepResult], pool: LanePool
) -> None:
    plan = PLANS[name]
    settings = {"mode": plan} if isinstance(plan, str) else {"plan": plan}
    with m2flow.launch(training(), items_per_step=ITEMS, lanes=pool, **settings) as run:
        results = run_steps(run)
        states = run.worker_call_everywhere("learner", "state")
    assert [result.step for result in results] == list(range(STEPS))
    for result, expected in zip(results, eager, strict=True):
        assert result.output.ids == expected.output.ids
        assert rows(result) == rows(expected)
        assert result.metrics == expected.metrics
        assert (result.version, result.staleness) == (expected.version, 0)
    assert len(set(states)) == 1, "the replicas of the learner have different weights"


class Counting(Worker):
    """Its `load` says nothing to that of `Worker`."""

    def load(self, place: m2flow.Place) -> None:
        self.count = 0

    @stage(accumulates=True)
    def count_items(self, batch: Batch) -> None:
        self.count += len(batch)

    @count_items.finish
    def count_finish(self) -> dict[str, float]:
        count = torch.tensor([self.count])
        self.place.all_reduce([count])
        return {"count": float(count), "lanes": float(self.place.size)}


class CountingFlow(Flow):
    counting: Counting

    def step(self, items: Stream) -> Stream:
        return self.counting.count_items(items)


def test_a_worker_knows_its_place_whatever_its_load_does(pool: LanePool) -> None:
    flow = CountingFlow(counting=Counting())
    with m2flow.launch(flow, items_per_step=ITEMS, mode="collocated", lanes=pool) as run:
        assert run.step(prompts(0)).metrics == {"count": ITEMS, "lanes": 2.0}
    with m2flow.launch(flow, items_per_step=ITEMS, num_threads=3) as run:
        assert run.step(prompts(0)).metrics == {"count": ITEMS, "lanes": 1.0}
        assert flow.counting.place.num_threads == 3


def test_a_run_may_bring_its_lanes_with_it(eager: list[StepResult]) -> None:
    """They are started for it, and end with it."""
    with m2flow.launch(
        training(), items_per_step=ITEMS, plan=hand_written(BOTH, GANG, chunk=3)
    ) as run:
        processes = [lane.process_id for lane in run._carrier.pool.addresses.values()]
        assert rows(run.step(prompts(0))) == rows(eager[0])
    deadline = time.monotonic() + SOON
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert ray.is_initialized()  # a connection that was there before is left alone


def test_a_step_may_run_on_the_weights_before_the_last(pool: LanePool) -> None:
    plan = hand_written(((0,),), SINGLE, chunk=1, max_staleness=1)
    with m2flow.launch(training(), items_per_step=ITEMS, plan=plan, lanes=pool) as run:
        results = run_steps(run)
    assert [result.version for result in results] == [1, 2, 3, 4]
    lags = []
    for result in results:
        lag = [result.step - version for version in rows(result)["version"]]
        assert all(0 <= one <= 1 for one in lag)
        # What the engine reports is what the sampler saw, which has 4 items to each of the prompts.
        assert result.staleness == sum(lag) / len(lag)
        lags += lag
    assert 1 in lags
    assert results[0].staleness == 0


def test_a_run_whose_lanes_were_given_to_another_has_ended(pool: LanePool) -> None:
    """It went on with the workers of the later one."""
    first, second = (
        m2flow.launch(training(), items_per_step=ITEMS, mode="collocated", lanes=pool)
        for _ in range(2)
    )
    assert second.step(prompts(0)).step == 0
    ended = "^run: has ended, since another was launched on its lanes; launch the flow again$"
    for use in (
        lambda: first.step(prompts(0)),
        lambda: first.worker_call("learner", "state"),
        lambda: first.replan(first.plan),
    ):
        with pytest.raises(UserError, match=ended):
            use()
    assert second.step(prompts(1)).step == 1
    flow = NoLoadFlow(worker=NoLoad())
    with pytest.raises(BadItemError, match="no model here"):
        m2flow.launch(flow, items_per_step=ITEMS, mode="collocated", lanes=pool)
    with pytest.raises(UserError, match=ended):
        second.step(prompts(2))


def test_no_run_is_launched_on_lanes_that_were_closed() -> None:
    with LanePool(lanes(1)) as closed:
        pass
    with pytest.raises(RunFailed, match=r"on these lanes any more: they were closed$"):
        m2flow.launch(training(), items_per_step=ITEMS, mode="collocated", lanes=closed)


# --- faults ---------------------------------------------------------------------------------------


class BadItemError(Exception):
    """An exception of the user's own."""


class TwoPartError(Exception):
    """One that cannot be rebuilt from its message."""

    def __init__(self, item: int, reason: str) -> None:
        super().__init__(f"item {item} is {reason}")


class Fragile(Worker):
    """Works for a while in its second step, and fails or never comes back there."""

    def __init__(self, fault: str, folder: str = "") -> None:
        self.fault, self.folder = fault, folder

    @stage
    def prepare(self, batch: Batch) -> Batch:
        return batch

    @stage
    def score(self, batch: Batch) -> Batch:
        if int(batch["x"].max()) >= ITEMS:  # the second step
            if self.fault == "raise":
                raise FileNotFoundError("item 3 is bad")
            if self.fault == "raise what cannot travel":
                raise TwoPartError(3, "bad")
            (Path(self.folder) / str(self.place.lane)).touch()
            time.sleep(LONG)
        return batch


class After(Worker):
    @stage
    def collect(self, batch: Batch) -> Batch:
        return batch


class FragileFlow(Flow):
    fragile: Fragile
    after: After

    def step(self, items: Stream) -> Stream:
        return self.after.collect(self.fragile.score(self.fragile.prepare(items)))


def fragile_plan(deadline_seconds: float = LONG) -> Plan:
    return Plan(
        "custom",
        lanes(2),
        {"fragile": Placement(((1,),)), "after": Placement(((0,),))},
        deadline_seconds=deadline_seconds,
    )


def launch_fragile(
    fault: str, folder: Path, pool: LanePool | None = None, deadline_seconds: float = LONG
) -> Run:
    flow = FragileFlow(fragile=Fragile(fault, str(folder)), after=After())
    plan = fragile_plan(deadline_seconds)
    where = pool or lanes(2)
    run = m2flow.launch(flow, items_per_step=ITEMS, plan=plan, lanes=where, lane_restarts=0)
    run.step(prompts(0))
    return run


def fail(run: Run) -> RunFailed:
    """The failure of the next step; the run is closed, whatever its lanes are still about."""
    with run, pytest.raises(RunFailed) as caught:
        run.step(prompts(1))
    return caught.value


def test_an_exception_in_a_stage_stops_the_run(tmp_path: Path, pool: LanePool) -> None:
    run = launch_fragile("raise", tmp_path, pool)
    error = fail(run)
    assert "fragile.score (step 1" in str(error)
    assert "failed on lane 1" in str(error)
    assert type(error.__cause__) is FileNotFoundError
    assert str(error.__cause__) == "item 3 is bad"
    notes = "\n".join(error.__cause__.__notes__)
    assert "On lane 1:" in notes
    assert "Traceback (most recent call last)" in notes
    assert "in score" in notes
    with pytest.raises(RunFailed, match="has stopped already"):
        run.step(prompts(0))


def test_an_exception_that_cannot_travel_keeps_its_words(tmp_path: Path, pool: LanePool) -> None:
    error = fail(launch_fragile("raise what cannot travel", tmp_path, pool))
    assert "failed on lane 1" in str(error)
    assert "item 3 is bad" in str(error.__cause__)
    assert "TwoPartError: item 3 is bad" in "\n".join(error.__cause__.__notes__)


@pytest.fixture
def silence_is_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that say nothing are not asked about: what is heard of them is heard by their lines."""
    monkeypatch.setattr(lines_module, "SILENCE_SECONDS", LONG)


def lane_1_killed(run: Run, folder: Path) -> RunFailed:
    """What the run's next step fails with when lane 1 is killed as soon as its stage has begun."""
    victim = run._carrier.pool.addresses[1].process_id
    assert victim != run._carrier.pool.addresses[0].process_id

    def kill() -> None:
        deadline = time.monotonic() + SOON
        while not (folder / "1").exists() and time.monotonic() < deadline:
            time.sleep(0.02)  # until the stage says that it has begun
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    error = fail(run)
    killer.join()
    assert (folder / "1").exists(), "it was killed before its stage had begun"
    assert "lane 1 was lost" in str(error)
    return error


@pytest.mark.usefixtures("silence_is_golden")
def test_a_lane_that_is_killed_is_named(tmp_path: Path) -> None:
    run = launch_fragile("sleep", tmp_path)
    error = lane_1_killed(run, tmp_path)
    assert "it held fragile" in str(error)
    assert "running: fragile.score (step 1" in str(error)


class Endless(Worker):
    """Streams on and on in its second step, and finishes nothing there."""

    collective = True

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @stage(streaming=True)
    def stream(self, batch: Batch) -> Generator[Batch, Batch | None, None]:
        while int(batch["x"].max()) >= ITEMS:
            (Path(self.folder) / str(self.place.lane)).touch()
            time.sleep(0.01)
            yield batch.select([])
        yield batch


class EndlessFlow(Flow):
    endless: Endless

    def step(self, items: Stream) -> Stream:
        return self.endless.stream(items)


@pytest.mark.usefixtures("silence_is_golden")
def test_a_lane_of_a_gang_that_is_killed_while_it_streams_is_named(tmp_path: Path) -> None:
    """The other lane waits for it to agree on what has come."""
    plan = Plan("custom", lanes(2), {"endless": Placement(GANG)}, deadline_seconds=LONG)
    flow = EndlessFlow(endless=Endless(str(tmp_path)))
    run = m2flow.launch(flow, items_per_step=ITEMS, plan=plan, lane_restarts=0)
    run.step(prompts(0))
    error = lane_1_killed(run, tmp_path)
    assert "running: endless.stream (step 1" in str(error)


def test_a_call_past_its_deadline_is_named_with_those_who_wait(tmp_path: Path) -> None:
    error = fail(launch_fragile("sleep", tmp_path, deadline_seconds=2.0))
    assert (tmp_path / "1").exists()
    first, *account = str(error).splitlines()
    assert "fragile.score (step 1" in first
    assert "deadline of 2 s" in first
    assert any("running: fragile.score" in line and "[1]" in line for line in account)
    assert any(f"waiting: after.collect (step 1): 0 of {ITEMS} items" in line for line in account)


class Writing(Worker):
    """Makes file after file in shared memory until it is killed, and keeps the last ones."""

    @stage
    def write(self, batch: Batch) -> Batch:
        pool, number = self.place.spill.name, 0
        while True:
            number += 1
            Path(f"/dev/shm/{pool}-0-1-{number}").touch()
            Path(f"/dev/shm/{pool}-0-1-{number - 20}").unlink(missing_ok=True)


class WritingFlow(Flow):
    writing: Writing

    def step(self, items: Stream) -> Stream:
        return self.writing.write(items)


def files_of(pool: LanePool) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{pool.folder.name}-0-1-*"))


def interrupt(pool: LanePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is interrupted when its lane has begun to write."""
    plan = Plan("custom", lanes(1), {"writing": Placement(((0,),))}, deadline_seconds=LONG)
    receive = pool.receive

    def interrupted(seconds: float) -> list[Any]:
        if files_of(pool):
            monkeypatch.undo()
            raise KeyboardInterrupt
        return receive(seconds)

    flow = WritingFlow(writing=Writing())
    with m2flow.launch(flow, items_per_step=ITEMS, plan=plan, lanes=pool) as run:
        monkeypatch.setattr(pool, "receive", interrupted)
        run.step(prompts(0))


def test_a_lane_writes_nothing_after_its_pool_has_cleared_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray calls a lane dead that is only told to end: what it still wrote was left for good."""
    with pytest.raises(KeyboardInterrupt), LanePool(lanes(1)) as pool:
        interrupt(pool, monkeypatch)
    assert not files_of(pool)


def test_a_folder_that_somebody_else_has_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the file that guards it is known before it is there."""
    guard, links = Sweeper.guard, list[Path]()

    def overtaken(self: Sweeper, folder: Path) -> None:
        guard(self, folder)
        folder.symlink_to(tmp_path)
        links.append(folder)

    monkeypatch.setattr(Sweeper, "guard", overtaken)
    with pytest.raises(RunFailed, match="is no folder that this user alone can enter"):
        LanePool(lanes(1))
    assert not list(tmp_path.iterdir())
    for link in links:
        link.unlink()


def test_a_lane_removes_what_its_killed_process_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine the launcher cannot, and memory was short until the run's end."""
    with LanePool(lanes(2)) as pool:
        monkeypatch.setattr(pool, "is_here", lambda _: False)
        left, of_other = (Path(f"/dev/shm/{pool.folder.name}-{lane}-left") for lane in (1, 0))
        left.touch()
        of_other.touch()
        pool.end(1, "killed")
        pool.restart([1])
        assert not left.exists()
        assert of_other.exists()


class SlowToStart(LaneProcess):
    """A lane that takes so long to start; the second one ends meanwhile."""

    seconds = 4.0

    def ready(self, visible: str | None = None) -> LaneAddress:
        if self.position == 1:
            os._exit(1)
        time.sleep(self.seconds)
        return super().ready(visible)


class NeverUp(SlowToStart):
    seconds = LONG


def test_lanes_may_take_as_long_to_start_as_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Imports from a file system that is slow at first took longer than two minutes."""
    monkeypatch.setattr(processes_module, "LaneProcess", SlowToStart)
    monkeypatch.setattr(processes_module, "START_SECONDS", 1.0)
    with pytest.raises(RunFailed, match=r"^lanes \[0\] have not started within 1 s$"):
        LanePool(lanes(1))
    with LanePool(lanes(1), start_seconds=120) as pool:
        assert list(pool.addresses) == [0]
    warned = [one.message for one in caplog.records if one.name == processes_module.__name__]
    assert warned == ["lanes [0] are not up after 1 s; they may take 120 s"]


def test_a_process_that_ends_while_others_start_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes_module, "LaneProcess", NeverUp)
    monkeypatch.setattr(processes_module, "START_TRIES", 1)
    with pytest.raises(RunFailed, match="lanes have not come up in 1 tries"):
        LanePool(lanes(2), start_seconds=LONG)


def test_lanes_that_the_cluster_has_no_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once the lanes of an earlier run would have ended, and long before lanes have to be up."""
    clock = Clock()
    monkeypatch.setattr(placing, "time", clock)
    monkeypatch.setattr(processes_module, "START_SECONDS", LONG)
    plan = Plan(
        "custom",
        (LaneSpec(0, cores=tuple(range(NUM_CPUS + 1))),),
        {"fragile": Placement(((0,),)), "after": Placement(((0,),))},
    )
    flow = FragileFlow(fragile=Fragile("raise"), after=After())
    with pytest.raises(UserError, match=f"need {NUM_CPUS + 1} CPUs") as caught:
        m2flow.launch(flow, items_per_step=ITEMS, plan=plan)
    assert placing.ROOM_SECONDS <= clock.now < placing.ROOM_SECONDS + 1
    assert "\n" not in str(caught.value)
    assert "lanes" in str(caught.value)
    assert ray.is_initialized()  # a connection that was there before is left alone


class NoLoad(Worker):
    def load(self, place: m2flow.Place) -> None:
        raise BadItemError("no model here")

    @stage
    def score(self, batch: Batch) -> Batch:
        return batch


class NoLoadFlow(Flow):
    worker: NoLoad

    def step(self, items: Stream) -> Stream:
        return self.worker.score(items)


class Locked(NoLoad):
    def __init__(self) -> None:
        self.tools = {"lock": threading.Lock()}


class CallingFlow(Flow):
    def __init__(self, call: Any) -> None:
        self.call = call

    def step(self, items: Stream) -> Stream:
        return self.call(items)


def test_what_cannot_be_sent_to_lanes_is_named(pool: LanePool) -> None:
    """It was a TypeError of pickle that named no worker."""
    lock = threading.Lock()

    @stage
    def holding(batch: Batch) -> Batch:
        with lock:
            return batch

    line = r"a lane gets a pickled copy.*thread\.lock.*; "
    for flow, words in (
        (NoLoadFlow(worker=Locked()), rf"^worker\.tools\['lock'\]: {line}make it in `load`$"),
        (CallingFlow(holding), rf"^holding: {line}make it in a worker's `load`$"),
    ):
        with pytest.raises(UserError, match=words):
            m2flow.launch(flow, items_per_step=ITEMS, mode="collocated", lanes=pool)
    launch_fragile("", Path(), pool).close()


def test_a_worker_that_cannot_load_says_why(pool: LanePool) -> None:
    plan = Plan("custom", lanes(1), {"worker": Placement(((0,),))})
    with pytest.raises(BadItemError, match="no model here"):
        m2flow.launch(NoLoadFlow(worker=NoLoad()), items_per_step=ITEMS, plan=plan, lanes=pool)
    launch_fragile("", Path(), pool).close()  # the lanes are as good as before


@pytest.mark.parametrize("staleness", [0, 1])
def test_steps_that_were_begun_do_not_go_on_with_the_workers_of_a_later_run(
    staleness: int, pool: LanePool
) -> None:
    plan = hand_written(((0,),), SINGLE, chunk=1, max_staleness=staleness)
    first = m2flow.launch(training(), items_per_step=ITEMS, plan=plan, lanes=pool)
    results = first.steps(prompts(step) for step in range(STEPS))
    assert next(results).step == 0
    second = m2flow.launch(training(), items_per_step=ITEMS, plan=plan, lanes=pool)
    with pytest.raises(UserError, match=r"^run: has ended, since another"):
        next(results)
    assert second.worker_call("learner", "state") == 0, "it was trained by the other run"


def test_a_flow_that_cannot_be_sent_leaves_the_run_on_the_lanes_as_it_is(pool: LanePool) -> None:
    first = m2flow.launch(training(), items_per_step=ITEMS, mode="collocated", lanes=pool)
    flow = NoLoadFlow(worker=Locked())
    with pytest.raises(UserError, match=r"this .* cannot be pickled"):
        m2flow.launch(flow, items_per_step=ITEMS, mode="collocated", lanes=pool)
    assert first.step(prompts(0)).step == 0


def test_a_batch_of_another_size_lets_the_steps_before_it_end(pool: LanePool) -> None:
    """The step in flight was lost, and no further one could be run."""
    plan = hand_written(((0,),), SINGLE, chunk=1, max_staleness=1)
    with m2flow.launch(training(), items_per_step=ITEMS, plan=plan, lanes=pool) as run:
        results = run.steps([prompts(0), prompts(1).select([0])])
        assert next(results).step == 0
        with pytest.raises(UserError, match="items_per_step"):
            next(results)
        assert run.step(prompts(1)).step == 1
