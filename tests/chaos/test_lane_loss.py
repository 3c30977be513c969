"""Lanes that are killed in the middle of something: the run gives what an undisturbed one gives.

The toy flow counts in integers, so that results can be compared without tolerance. A worker kills
its own process when it comes to the moment that a test has named; a file tells that it has done so.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import ProcessEnded, RunFailed
from m2flow.flow import Layout
from m2flow.runtime.driver import moving, recovery
from m2flow.runtime.driver import processes as processes_module
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.launch import Run
from m2flow.runtime.driver.placing import nodes_for
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import LOST, Recovery
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.driver.spares import Spares
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS, SAMPLES, STEPS = 6, 4, 4
LANES = tuple(LaneSpec(number) for number in range(3))


@dataclass(frozen=True)
class Death:
    """When a process kills itself: at a moment in a step, and so many times in all.

    It is killed, takes a "segfault", as in a simulator, or calls "exit". With `beside` it lives:
    what is gone is a process that a worker has started. With `after` it waits until the learner has
    noted that line.

    `notes` is the file where the learner notes what it does, line by line.
    """

    moment: str = ""
    version: int = 0
    folder: str = ""
    times: int = 1
    by: str = "kill"
    beside: bool = False
    notes: str = ""
    after: str = ""

    def note(self, *lines: str) -> None:
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.writelines(f"{line}\n" for line in lines)

    def noted(self) -> list[str]:
        path = Path(self.notes)
        return path.read_text().splitlines() if path.exists() else []

    def at(self, moment: str, version: int) -> None:
        if (moment, version) != (self.moment, self.version):
            return
        while self.after and self.after not in self.noted():
            time.sleep(0.01)
        for number in range(self.times):
            with suppress(FileExistsError):
                (Path(self.folder) / str(number)).touch(exist_ok=False)  # one process alone can
                if self.beside:
                    raise ProcessEnded("the scorer was ended by SIGKILL\nand more")
                if self.by == "segfault":
                    ctypes.string_at(0)
                if self.by == "exit":
                    os._exit(7)
                os.kill(os.getpid(), signal.SIGKILL)


class Sampler(Worker):
    """Takes what has come after each sample; it dies when it has handed half of them on."""

    def __init__(self, death: Death) -> None:
        self.samples, self.weight, self.version, self.death = SAMPLES, 0, 0, death

    def load(self, place: Any) -> None:
        super().load(place)
        self.version = place.version
        self.death.at("load", self.version)

    @stage(streaming=True, expands="samples")
    def generate(self, prompts: Batch) -> Generator[Batch, Batch | None, None]:
        pending = prompts.repeat(self.samples)
        half = len(pending) // 2
        while len(pending):
            if len(pending) == half:
                self.death.at("generate", self.version)
            first = pending.select([0])
            sample = torch.tensor(first.ids) % self.samples
            y = first["x"] * 3 + sample * sample + self.weight
            fed = yield first.with_columns(y=y)
            pending = pending.select(range(1, len(pending)))
            if fed is not None:
                more = fed.repeat(self.samples)
                pending = Batch.concat([pending, more]) if len(pending) else more

    @stage
    def answer(self, prompts: Batch) -> Batch:
        self.death.at("answer", self.version)
        return prompts.with_columns(y=prompts["x"] + self.weight)

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.death.at("install", version)
        self.weight, self.version = int(weights["w"]), version


class Judge(Worker):
    """Gives points."""

    def __init__(self, death: Death) -> None:
        self.death = death

    @stage
    def score(self, batch: Batch) -> Batch:
        self.death.at("score", int(batch["x"].min()) // ITEMS)
        return batch.with_columns(a=batch["y"] % 17)


class HeldJudge(Judge):
    """Gives the second step's points when the file "paused" is there, and not before."""

    def __init__(self, death: Death) -> None:
        super().__init__(death)
        self.file = Path(death.folder) / "paused"

    @stage
    def score(self, batch: Batch) -> Batch:
        deadline = time.monotonic() + 30
        while int(batch["x"].min()) // ITEMS == 1 and not self.file.exists():
            assert time.monotonic() < deadline, "nobody has paused"
            time.sleep(0.01)
        return super().score(batch)


class RingedJudge(Judge):
    """Refers to itself; its file, named by its lane, is there as long as it is."""

    def load(self, place: Any) -> None:
        super().load(place)
        self.me = self
        file = Path(self.death.folder) / f"alive {place.lane} {id(self)}"
        file.touch()
        weakref.finalize(self, file.unlink)


class Learner(Worker):
    """Learns a number; it moves away from where it began with every mini-batch."""

    def __init__(self, death: Death) -> None:
        self.w = self.sum = self.steps = 0
        self.death = death

    def load(self, place: Any) -> None:
        super().load(place)
        self.steps = 2 * place.version

    @stage
    def logprobs(self, batch: Batch) -> Batch:
        return batch.with_columns(z=batch["y"] * 2 + self.w)

    @stage(accumulates=True, minibatches=2)
    def train(self, batch: Batch) -> None:
        self.death.note(*(f"folds {item} of {self.steps}" for item in batch.ids))
        self.sum += int((batch["a"] * (torch.tensor(batch.ids) + 1) + batch["z"]).sum())
        self._at("train")

    @train.finish
    def train_finish(self) -> dict[str, float]:
        self._at("finish")
        self.death.note(f"ends {self.steps}")
        total = torch.tensor([self.sum])
        self.place.all_reduce([total])
        self.w, self.sum, self.steps = (self.w * 7 + int(total)) % 1009, 0, self.steps + 1
        return {"total": float(total), "w": float(self.w)}

    def _at(self, moment: str) -> None:
        """Only where the learner's second half of a step is under way."""
        if self.steps % 2:
            self.death.at(moment, self.steps // 2)

    def weights(self) -> dict[str, torch.Tensor]:
        self.death.at("publish", self.steps // 2)
        return {"w": torch.tensor(self.w)}

    def discard(self) -> None:
        self.sum = 0

    def state(self) -> int:
        self.death.at("asked", self.steps // 2)
        return self.w

    def save(self) -> dict[str, torch.Tensor]:
        self.death.at("save", self.steps // 2)
        return {"state": torch.tensor([self.w, self.steps])}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.w, self.steps = state["state"].tolist()


class Pair(Learner):
    """A learner on a gang of two lanes, which take part in each call together."""

    collective = True

    def layouts(self, kind: str, lanes: int) -> tuple[Layout, ...]:
        return (Layout("pair", 2),) if lanes >= 2 else ()


class Forgetful(Learner):
    """Does not say how its state is saved."""

    save = Worker.save
    restore = Worker.restore


class Training(Flow):
    sampler: Sampler
    judge: Judge
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        samples = self.judge.score(self.sampler.generate(prompts))
        return self.learner.train(self.learner.logprobs(samples))

    def evaluate(self, prompts: Stream) -> Stream:
        return self.sampler.answer(prompts)

    def sync(self) -> None:
        self.learner.publish(self.sampler)


def plan(**spots: tuple[tuple[int, ...], ...]) -> Plan:
    placements = {worker: Placement(replicas) for worker, replicas in spots.items()}
    return Plan("custom", LANES, placements, deadline_seconds=60.0)


APART = plan(sampler=((0,),), judge=((1,),), learner=((2,),))
TOGETHER = plan(sampler=((0,), (1,), (2,)), judge=((0,), (1,)), learner=((0,), (1,), (2,)))
"""The learner has three replicas, which sum over a process group."""

GANG = Plan(
    "custom",
    LANES,
    {
        "sampler": Placement(((0,),)),
        "judge": Placement(((1,),)),
        "learner": Placement(((1, 2),), layout="pair"),
    },
    deadline_seconds=60.0,
)
"""The learner's only replica is two lanes."""


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with local_cluster(len(LANES)), LanePool(LANES) as lanes:
        yield lanes


def prompts(step: int) -> Batch:
    return Batch({"x": torch.arange(ITEMS) + ITEMS * step})


def start(chosen: Plan, death: Death, pool: LanePool | None, **options: Any) -> Run:
    judge, learner = options.pop("judge", Judge)(death), options.pop("learner", Learner)(death)
    flow = Training(sampler=Sampler(death), judge=judge, learner=learner)
    where = {"mode": "eager"} if pool is None else {"plan": chosen, "lanes": pool}
    also = {"evaluate": ITEMS}
    return m2flow.launch(flow, items_per_step=ITEMS, also=also, **where, **options)


@dataclass
class Seen:
    """What a run has given."""

    steps: list[StepResult]
    figures: list[Any]


def seen(run: Run) -> Seen:
    """Train, evaluate, ask the learner, and train on."""
    steps, figures = [], []
    for part in (range(2), range(2, STEPS)):
        steps += run.steps(prompts(step) for step in part)
        evaluated = run.run_method("evaluate", prompts(9)).output
        figures += [evaluated["y"].tolist(), run.worker_call("learner", "state")]
    figures += [(r.step, r.version, r.metrics, r.output["z"].tolist()) for r in steps]
    return Seen(steps, figures)


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    with start(APART, Death(), None) as run:
        return seen(run).figures


def test_workers_from_before_a_loss_give_their_memory_back(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """One that was closed, and referred to itself, stayed beside the one that was loaded then.

    Stands before the tests of process groups, for whose sake all lanes are started again.
    """
    with start(APART, Death("train", 1, str(tmp_path)), pool, judge=RingedJudge) as run:
        process = pool.addresses[1].process_id
        assert seen(run).figures == undisturbed
        alive = [file.name.split()[1] for file in tmp_path.glob("alive *")]
    assert [loss.lane for loss in run.losses] == [2], "the learner's lane was to be lost"
    assert pool.addresses[1].process_id == process, "the judge's lane was to stay"
    assert alive == ["1"]


@pytest.mark.parametrize(
    ("chosen", "moment", "version"),
    [
        (APART, "load", 0),
        (APART, "generate", 0),
        (APART, "score", 2),
        (APART, "train", 1),
        (APART, "publish", 2),
        (APART, "publish", STEPS),  # the last one: whoever evaluates waits for nobody that is gone
        (APART, "install", 3),
        (APART, "asked", 4),
        (APART, "save", 1),
        (TOGETHER, "finish", 3),
        (GANG, "train", 1),
        (GANG, "finish", 3),
    ],
)
def test_a_run_that_loses_a_lane_gives_what_an_undisturbed_one_gives(
    chosen: Plan,
    moment: str,
    version: int,
    pool: LanePool,
    tmp_path: Path,
    undisturbed: list[Any],
) -> None:
    before = {lane: address.process_id for lane, address in pool.addresses.items()}
    learner = Pair if chosen is GANG else Learner
    with start(chosen, Death(moment, version, str(tmp_path)), pool, learner=learner) as run:
        found = seen(run)
    assert (tmp_path / "0").exists(), "nobody was killed"
    assert found.figures == undisturbed
    (loss,) = run.losses
    after = {lane: address.process_id for lane, address in pool.addresses.items()}
    assert before[loss.lane] != after[loss.lane]
    if chosen is APART:
        changed = {lane for lane in before if before[lane] != after[lane]}
        assert changed == {loss.lane}, "lanes that were up were started again"
    assert str(loss).startswith(f"lane {loss.lane} was lost (")
    assert "; back after " in str(loss)
    spans = [span for result in found.steps for span in result.spans if span.name == LOST]
    if moment not in (
        "load",
        "answer",
        "asked",
    ):  # then no step was under way, and the next one tells
        assert [span.lane for span in spans] == [loss.lane]


@pytest.mark.parametrize(
    ("moment", "version", "again"), [("generate", 2, 0), ("score", 3, 0), ("finish", 3, 3)]
)
def test_a_run_goes_on_from_a_replica_that_has_not_learnt_since_the_last_step(
    moment: str,
    version: int,
    again: int,
    pool: LanePool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[Any],
) -> None:
    monkeypatch.setattr(Recovery, "is_due", lambda *_: False)
    with start(TOGETHER, Death(moment, version, str(tmp_path)), pool) as run:
        found = seen(run)
    assert (tmp_path / "0").exists(), "nobody was killed"
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert loss.steps == again, "there was no snapshot but that of the start"


@pytest.mark.parametrize("staleness", [0, 1])
def test_steps_wait_for_a_snapshot_only_where_they_overlap(
    staleness: int,
    pool: LanePool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[Any],
) -> None:
    noted: list[str] = []

    def noting(name: str) -> None:
        method = getattr(Recovery, name)

        def note(self: Recovery, *args: Any) -> None:
            noted.append(name)
            if name == "pause":
                (tmp_path / "paused").touch()
            method(self, *args)

        monkeypatch.setattr(Recovery, name, note)

    monkeypatch.setattr(recovery, "SHARE", math.inf)
    for name in ("pause", "begin", "keep"):
        noting(name)
    chosen, death = replace(APART, max_staleness=staleness), Death(folder=str(tmp_path))
    # the second step is in flight when the first one's result is given
    with start(chosen, death, pool, judge=HeldJudge if staleness else Judge) as run:
        for result in run.steps(prompts(step) for step in range(STEPS)):
            assert run.worker_call("learner", "state") >= 0
            assert staleness or result.metrics == undisturbed[4 + result.step][2]
    assert noted.count("begin") >= 1
    assert noted.count("keep") == noted.count("begin")
    assert ("pause" in noted) is bool(staleness)


def test_lanes_save_while_weights_go_out_and_the_result_is_on_its_way(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch, undisturbed: list[Any]
) -> None:
    begun: list[tuple[int, int]] = []
    begin = Recovery.begin

    def noted(self: Recovery, step: int) -> None:
        begun.append((step, self.given))
        begin(self, step)

    monkeypatch.setattr(recovery, "BUSY", math.inf)
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    monkeypatch.setattr(Recovery, "begin", noted)
    with start(APART, Death(), pool) as run:
        results = list(run.steps(prompts(step) for step in range(STEPS)))
    assert [result.metrics for result in results] == [figures[2] for figures in undisturbed[4:]]
    assert begun == [(step + 1, step) for step in range(STEPS)]


def test_a_snapshot_is_taken_while_the_result_of_its_step_is_looked_at(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch, undisturbed: list[Any]
) -> None:
    """A learner that is lost then has nothing to take again."""
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    with start(APART, Death(), pool) as run:
        results = run.steps(prompts(step) for step in range(STEPS))
        steps = [next(results)]
        run.worker_call("learner", "state")  # waits for it
        os.kill(pool.addresses[2].process_id, signal.SIGKILL)
        steps += results
    assert [result.metrics for result in steps] == [figures[2] for figures in undisturbed[4:]]
    (loss,) = run.losses
    assert loss.steps == 0


def test_a_snapshot_is_taken_after_so_many_steps_at_the_latest(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = Recovery.begin

    def noted(self: Recovery, step: int) -> None:
        begun.append(step)
        begin(self, step)

    monkeypatch.setattr(Recovery, "begin", noted)
    for name in ("SHARE", "BUSY"):
        monkeypatch.setattr(recovery, name, 1e-9)  # it would never be worth its time again
    with start(APART, Death(), pool, snapshot_every=2) as run:
        assert len(list(run.steps(prompts(step) for step in range(STEPS)))) == STEPS
    assert begun == [1, 3], "nothing was known of what the first one takes"


@pytest.mark.timeout(60)
def test_whoever_asks_a_worker_waits_for_no_snapshot_behind_results_still_to_be_taken(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    monkeypatch.setattr(Recovery, "can_keep", False)
    with start(APART, Death(), pool) as run:
        states = [
            run.worker_call("learner", "state")
            for _ in run.steps(prompts(step) for step in range(STEPS))
        ]
    assert len(states) == STEPS


class Cramped(Learner):
    """Has no memory for its first copy."""

    tried = False

    def save(self) -> dict[str, torch.Tensor]:
        if not self.tried:
            self.tried = True
            raise torch.OutOfMemoryError("no room for 7 GB")
        return super().save()


def test_a_snapshot_that_runs_out_of_memory_ends_no_run(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch, undisturbed: list[Any]
) -> None:
    monkeypatch.setattr(recovery, "SHARE", math.inf)
    with start(APART, Death(), pool, learner=Cramped) as run:
        found = seen(run)
    assert found.figures == undisturbed
    notes = [note for step in found.steps for note in step.notes]
    assert any("the last one has failed: " in note and "7 GB" in note for note in notes), notes


class Overdue(Exception):
    """The time to stop has passed."""


def test_steps_that_are_taken_again_cannot_be_given_up(
    pool: LanePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state from between them would be kept as that of the step whose result is given next."""
    for name in ("SHARE", "BUSY"):
        monkeypatch.setattr(recovery, name, 1e-9)  # no snapshot after the first one

    with start(APART, Death("train", 2, str(tmp_path)), pool) as run:

        def heed() -> None:
            step = run._runners["step"]
            if step.busy and step.first_open[0] < run._recovery.given:
                raise Overdue

        run.heed = heed
        with pytest.raises(Overdue):
            list(run.steps(prompts(step) for step in range(STEPS)))
        assert not run.give_up(run._recovery.given, 10.0)
    assert (tmp_path / "0").exists(), "nobody was killed"


@pytest.mark.parametrize(("moment", "version"), [("generate", 1), ("score", 2), ("install", 3)])
def test_a_process_that_a_worker_has_started_is_gone(
    moment: str, version: int, pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """The lane of that worker is started again, and says why."""
    before = {lane: address.process_id for lane, address in pool.addresses.items()}
    death = Death(moment, version, str(tmp_path), beside=True)
    with start(APART, death, pool) as run:
        found = seen(run)
    assert (tmp_path / "0").exists(), "nobody was killed"
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert loss.lane == (1 if moment == "score" else 0)
    assert loss.reason == "the scorer was ended by SIGKILL"
    assert pool.addresses[loss.lane].process_id != before[loss.lane]


def test_processes_that_are_gone_again_and_again_end_the_run(
    pool: LanePool, tmp_path: Path
) -> None:
    death = Death("score", 1, str(tmp_path), times=99, beside=True)
    with start(APART, death, pool, lane_restarts=2) as run, pytest.raises(RunFailed) as caught:
        seen(run)
    assert str(caught.value).startswith("lane 1 was lost: the scorer was ended by SIGKILL\n")
    assert "started again 2 times" in str(caught.value)
    pool.restart(list(pool.lost))


def test_steps_that_overlap_are_taken_again_in_order(pool: LanePool, tmp_path: Path) -> None:
    def run_of(death: Death) -> list[Any]:
        chosen = Plan("custom", LANES, APART.placements, max_staleness=1, deadline_seconds=60.0)
        with start(chosen, death, pool) as run:
            results = list(run.steps(prompts(step) for step in range(STEPS)))
            return [(r.step, r.version, r.output["x"].tolist()) for r in results]

    death = Death("generate", 2, str(tmp_path))
    assert run_of(death) == run_of(Death())
    assert (tmp_path / "0").exists()


def test_rollouts_of_a_lost_step_are_not_made_again(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """They were kept on disk; the next run on these lanes keeps nothing there."""
    folder = tmp_path / "journal"
    with start(APART, Death("train", 1, str(tmp_path)), pool) as run:
        run.keep_rollouts(Journal(folder, 1 << 20))
        found = seen(run)
    assert found.figures == undisturbed
    assert [loss.lane for loss in run.losses] == [2]
    recalled = {step.step: step.recalled for step in found.steps if step.recalled}
    assert recalled == {1: ITEMS * SAMPLES}
    for file in folder.iterdir():
        file.unlink()
    with start(APART, Death(), pool) as run:
        assert seen(run).figures == undisturbed
    assert not list(folder.iterdir())


def test_a_spare_process_takes_the_place_of_a_lane(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that comes back is the process that has waited, and another one waits then."""
    with monkeypatch.context() as patch:
        processes = pool.processes
        patch.setattr(processes, "spares", spares := Spares(1, processes.make_spare))
        spares.keep(LANES, nodes_for(LANES))
        (actor,) = spares.actors
        ray.get(actor.warm.remote([]), timeout=60.0)
        with start(APART, Death("score", 1, str(tmp_path)), pool) as run:
            found = seen(run)
        (other,) = spares.actors
        spares.end()
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert pool.processes.actors[loss.lane] == actor
    assert other != actor


def test_a_process_for_a_lane_starts_while_the_other_lanes_stop(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    before: list[Any] = []
    processes, stop = pool.processes, moving.stopped

    def make(*arguments: Any) -> Any:
        made.append(make_one(*arguments))
        return made[-1]

    def stopped(*arguments: Any) -> set[int]:
        before.extend(made)
        return stop(*arguments)

    make_one = processes._make
    monkeypatch.setattr(processes, "_make", make)
    monkeypatch.setattr(moving, "stopped", stopped)
    with start(APART, Death("train", 1, str(tmp_path)), pool) as run:
        found = seen(run)
    assert found.figures == undisturbed
    (started,) = before
    assert started in processes.actors.values()
    assert not processes.spares.actors, "no process is left that waits"


def test_two_losses_in_a_row_both_take_a_spare_process(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before it has done its imports: no other process is started beside it."""
    made: list[Any] = []
    processes = pool.processes

    def make(*arguments: Any) -> Any:
        made.append(make_one(*arguments))
        return made[-1]

    make_one = processes._make
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_make", make)
        patch.setattr(processes, "spares", spares := Spares(1, processes.make_spare))
        spares.keep(LANES, nodes_for(LANES))
        with start(APART, Death("score", 1, str(tmp_path), times=2), pool) as run:
            found = seen(run)
        waiting = spares.actors
        spares.end()
    assert found.figures == undisturbed
    first, second = run.losses
    assert first.lane == second.lane
    assert made[1:] == [processes.actors[first.lane], *waiting]


def test_a_process_that_ends_before_its_lane_is_up_is_started_again(
    pool: LanePool, tmp_path: Path, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said where it can be reached, and is killed before anybody has."""
    victims: list[int] = []
    connect = processes_module.connect

    def killed_first(address: Any, key: bytes, **options: Any) -> Any:
        if not victims:
            (lane,) = (x for x in pool.addresses.values() if x.line == address)
            victims.append(lane.process_id)
            os.kill(lane.process_id, signal.SIGKILL)
            while process_is_there(lane.process_id):
                time.sleep(0.01)
        return connect(address, key, **options)

    monkeypatch.setattr(processes_module, "connect", killed_first)
    with start(APART, Death("score", 1, str(tmp_path)), pool) as run:
        found = seen(run)
    assert victims
    assert found.figures == undisturbed
    (loss,) = run.losses
    assert pool.addresses[loss.lane].process_id != victims[0]


def process_is_there(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_processes_that_never_come_up_end_the_run(
    pool: LanePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(processes_module, "connect", refused)
    run = start(APART, Death("score", 1, str(tmp_path)), pool)
    with run, pytest.raises(RunFailed, match="not come up in 3 tries: nobody listens"):
        seen(run)
    monkeypatch.undo()
    pool.restart(list(pool.lost))


def test_a_lane_that_dies_again_and_again_ends_the_run(pool: LanePool, tmp_path: Path) -> None:
    death = Death("score", 1, str(tmp_path), times=99)
    with start(APART, death, pool, lane_restarts=2) as run, pytest.raises(RunFailed) as caught:
        seen(run)
    check_given_up(caught.value, tmp_path, pool)


def test_a_lane_that_dies_whenever_its_workers_load_ends_the_launch(
    pool: LanePool, tmp_path: Path
) -> None:
    death = Death("load", 0, str(tmp_path), times=99)
    with pytest.raises(RunFailed) as caught:
        start(APART, death, pool, lane_restarts=2)
    check_given_up(caught.value, tmp_path, pool, lane=0)


def check_given_up(error: RunFailed, folder: Path, pool: LanePool, lane: int = 1) -> None:
    assert len(list(folder.iterdir())) == 3
    first, second, *_ = str(error).splitlines()
    assert first.startswith(f"lane {lane} was lost: ")
    assert "started again 2 times, which is the most (`lane_restarts`)" in second
    with pytest.raises(RunFailed, match="no run can be started on these lanes"):
        start(APART, Death(), pool)
    pool.restart(list(pool.lost))


def test_a_lost_learner_that_is_not_saved_ends_the_run(pool: LanePool, tmp_path: Path) -> None:
    death = Death("train", 1, str(tmp_path))
    run = start(APART, death, pool, learner=Forgetful)
    with run, pytest.raises(RunFailed, match="there is no snapshot of what was learnt") as caught:
        seen(run)
    assert "learner does not say how its state is saved" in str(caught.value)
    assert "`--resume` goes on from the last checkpoint" in str(caught.value)
    pool.restart(list(pool.lost))


def test_a_run_that_is_to_end_brings_no_lane_back(pool: LanePool, tmp_path: Path) -> None:
    with start(APART, Death("score", 1, str(tmp_path)), pool) as run:
        run.may_heal = lambda: False
        with pytest.raises(RunFailed, match="lane 1 was lost"):
            seen(run)
        assert not run.losses
    pool.restart(list(pool.lost))
