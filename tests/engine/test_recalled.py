"""A step that is run again uses what is there, makes the rest once, and gives the same.

A first run of a toy keeps all of its rollouts. Then any share of them is left on disk, as a kill at
any moment leaves it, and the steps are taken again under any plan.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import m2flow
from m2flow import Batch, Flow, Stream, Worker, loop, stage
from m2flow.engine import Plan
from m2flow.flow.rollouts import Rollouts
from m2flow.plan import build_plan, parse_lanes, validate
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.lane.frames import read_frames
from m2flow.runtime.lane.journal import JournalPlace, JournalWriter
from tests.engine.random_cases import plans
from tests.engine.test_promise import on_single_lanes

ITEMS, STEPS, MODULUS = 4, 3, 10_007


class Policy(Worker):
    """Notes what it makes."""

    def __init__(self) -> None:
        self.w, self.made = 1, Counter[tuple[str, int, int]]()

    def note(self, what: str, batch: Batch) -> None:
        self.made.update(
            (what, step, item) for step, item in zip(batch["step"], batch.ids, strict=True)
        )

    @stage(streaming=True, expands=3)
    def sample(
        self, batch: Batch, *, without: Collection[int] = ()
    ) -> Generator[Batch, Batch | None, None]:
        pending = rows_of(batch, 3)
        while pending:
            one = pending.pop()
            fed = None
            if one.ids[0] not in without:
                self.note("sample", one)
                y = [(one["x"][0] * 31 + one.ids[0] * 7 + self.w) % MODULUS]
                fed = yield one.with_columns(y=y)
            if fed is not None:
                pending += rows_of(fed, 3)

    @stage(streaming=True, expands=3)
    def sample_all(self, batch: Batch) -> Generator[Batch, Batch | None, None]:
        """Knows nothing of what is there."""
        yield from self.sample(batch)

    @stage(expands=3)
    def sample_at_once(self, batch: Batch) -> Batch:
        return Batch.concat(list(self.sample(batch)))

    @stage
    def act(self, batch: Batch) -> Batch:
        self.note("act", batch)
        y = [(y * 3 + self.w) % MODULUS for y in batch["y"]]
        return batch.with_columns(y=y)

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.w = int(weights["w"])


def rows_of(batch: Batch, count: int) -> list[Batch]:
    return [batch.repeat(count).select([row]) for row in range(count * len(batch))]


class Simulator(Worker):
    """Holds a state for each episode that is under way."""

    def __init__(self) -> None:
        self.states: dict[int, int] = {}
        self.begun = Counter[tuple[int, int]]()

    @stage(sticky=True)
    def begin(self, batch: Batch) -> Batch:
        self.begun.update(zip(batch["step"], batch.ids, strict=True))
        self.states.update(dict.fromkeys(batch.ids, 0))
        return batch.with_columns(y=[x % MODULUS for x in batch["x"]])

    @stage(sticky=True)
    def go_on(self, batch: Batch) -> Batch:
        done = []
        for item in batch.ids:
            self.states[item] += 1
            done.append(self.states[item] == 1 + item % 3)
        return batch.with_columns(done=done)


class Learner(Worker):
    def __init__(self) -> None:
        self.w, self.folded = 1, 0

    @stage(accumulates=True, minibatches=2)
    def train(self, batch: Batch) -> Batch:
        self.folded += sum(y * (1 + item) for y, item in zip(batch["y"], batch.ids, strict=True))
        return batch

    @train.finish
    def train_finish(self) -> dict[str, float]:
        self.w = (self.w * 17 + self.folded) % MODULUS
        self.folded = 0
        return {"w": float(self.w)}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"w": torch.tensor(self.w)}


@stage
def told(batch: Batch) -> Batch:
    return batch.with_columns(x=[x + 1 for x in batch["x"]])


@stage(unit="group")
def centre(batch: Batch) -> Batch:
    y = batch["y"]
    totals = [sum(y[row - row % 3 : row - row % 3 + 3]) for row in range(len(y))]
    return batch.with_columns(y=[(a + b) % MODULUS for a, b in zip(y, totals, strict=True)])


@stage
def both(one: Batch, other: Batch) -> Batch:
    return one.with_columns(
        y=[(a + b) % MODULUS for a, b in zip(one["y"], other["x"], strict=True)]
    )


class Language(Flow):
    policy: Policy
    learner: Learner

    def step(self, x: Stream) -> Stream:
        return self.learner.train(centre(self.policy.sample(told(x))))

    def sync(self) -> None:
        self.learner.publish(self.policy)


class Unaware(Language):
    def step(self, x: Stream) -> Stream:
        return self.learner.train(centre(self.policy.sample_all(told(x))))


class AtOnce(Language):
    def step(self, x: Stream) -> Stream:
        return self.learner.train(centre(self.policy.sample_at_once(x)))


class Embodied(Flow):
    """What begins is also read beside the loop."""

    policy: Policy
    simulator: Simulator
    learner: Learner

    def step(self, x: Stream) -> Stream:
        x = told(x)
        left = loop(self.policy.act, self.simulator.go_on)(self.simulator.begin(x))
        return self.learner.train(both(left, x))

    def sync(self) -> None:
        self.learner.publish(self.policy)


FLOWS: dict[str, Any] = {
    "streaming": lambda: Language(policy=Policy(), learner=Learner()),
    "unaware": lambda: Unaware(policy=Policy(), learner=Learner()),
    "at once": lambda: AtOnce(policy=Policy(), learner=Learner()),
    "loop": lambda: Embodied(policy=Policy(), simulator=Simulator(), learner=Learner()),
}
GRAPHS = {name: make().trace() for name, make in FLOWS.items()}


def batch(step: int) -> Batch:
    return Batch({"x": [step * 100 + k for k in range(ITEMS)], "step": [step] * ITEMS})


def run(flow: Flow, plan: Plan, folder: Path | None) -> list[StepResult]:
    with m2flow.launch(flow, items_per_step=ITEMS, plan=replace(plan, mode="eager")) as started:
        if folder is not None:
            started.keep_rollouts(Journal(folder, 10**9))
        return list(started.steps(batch(step) for step in range(STEPS)))


def eager(name: str) -> Plan:
    return build_plan("eager", GRAPHS[name], parse_lanes("cpu:1"), ITEMS)


class Whole:
    """An undisturbed run of each flow, with its rollouts item by item."""

    def __init__(self, folder: Path) -> None:
        self.results: dict[str, list[StepResult]] = {}
        self.frames: dict[str, list[Rollouts]] = {}
        for name, make in FLOWS.items():
            kept = folder / name.replace(" ", "-")
            self.results[name] = run(make(), eager(name), kept)
            found = [one for path in sorted(kept.iterdir()) for one in read_frames(path)]
            self.frames[name] = [
                replace(one, batch=one.batch.select([row]))
                for one in found
                for row in range(len(one.batch))
            ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


def left_over(folder: Path, frames: list[Rollouts], dice: random.Random) -> set[tuple[int, int]]:
    """Leave some of the rollouts in a folder; (step, item) of them."""
    share = dice.choice((0.0, 0.3, 0.7, 1.0))
    some = [one for one in frames if dice.random() < share]
    dice.shuffle(some)
    writer = JournalWriter(JournalPlace("step", str(folder), 10**9))
    for one in some:
        writer.add(one)
    writer.close()
    return {(one.step, one.batch.ids[0]) for one in some}


@pytest.mark.parametrize("name", FLOWS)
def test_a_run_keeps_each_rollout_once(whole: Whole, name: str) -> None:
    count = ITEMS if name == "loop" else 3 * ITEMS
    kept = Counter((one.step, one.version, one.batch.ids[0]) for one in whole.frames[name])
    assert kept == Counter((step, step, item) for step in range(STEPS) for item in range(count))


@pytest.mark.parametrize("name", FLOWS)
@given(data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_share_of_the_rollouts_gives_the_same_under_any_plan(
    whole: Whole, name: str, tmp_path_factory: pytest.TempPathFactory, data: Any, seed: int
) -> None:
    plan = data.draw(plans(GRAPHS[name], ITEMS).map(on_single_lanes))
    validate(plan, GRAPHS[name], ITEMS)
    folder = tmp_path_factory.mktemp("journal")
    folder.rmdir()
    there = left_over(folder, whole.frames[name], random.Random(seed))
    usable, flow = there, FLOWS[name]()
    if name == "at once":
        whole_units = Counter((step, item // 3) for step, item in there)
        usable = {one for one in there if whole_units[one[0], one[1] // 3] == 3}
    for ours, theirs in zip(run(flow, plan, folder), whole.results[name], strict=True):
        assert ours.output.ids == theirs.output.ids
        assert {key: list(x) for key, x in ours.output.columns.items()} == theirs.output.columns
        assert ours.metrics == theirs.metrics
        assert ours.staleness == 0
        assert ours.recalled == sum(step == ours.step for step, _ in usable)
    made = Counter((step, item) for _, step, item in flow.policy.made.elements())
    everything = {(step, item) for step in range(STEPS) for item in range(3 * ITEMS)}
    if name == "streaming":
        assert made == Counter(everything - there)
    elif name == "loop":
        lacking = {(step, item) for step, item in everything if item < ITEMS} - there
        assert set(made) == lacking
        assert flow.simulator.begun == Counter(lacking), "no episode begins for nobody"
    else:  # whole groups are made
        lacking = {(step, item // 3) for step, item in everything - there}
        assert made == Counter(
            (step, item) for step, item in everything if (step, item // 3) in lacking
        )
    journal = Journal(folder, 10**9)
    for step in range(STEPS):
        kept = journal.of_step(step, GRAPHS[name], ITEMS, 0)
        assert sum(len(one.batch) for one in kept) == (ITEMS if name == "loop" else 3 * ITEMS)
