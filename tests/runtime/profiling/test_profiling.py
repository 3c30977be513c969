"""A flow whose stages take known times, measured on real lanes; and profiles that are kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from m2flow import Batch, Flow, Stream, UserError, Worker, stage
from m2flow.engine.plan import LaneSpec
from m2flow.flow import GIVE_BACK, Arrived, Ragged, Unfinished
from m2flow.plan.file import to_json
from m2flow.plan.measured import fit_to, trial_plans
from m2flow.plan.profile import Profile
from m2flow.plan.units import Seconds
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.profiling import cached, keep, measure_flow, obtain, stored_at
from m2flow.runtime.profiling.session import Session
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS, SAMPLES = 8, 2
ROUND, ADMIT = 0.01, 0.03
SCORE, SCORE_ITEM = 0.02, 0.004
TRAIN_ITEM, FINISH = 0.012, 0.05
TRAIN_BYTES, FINISH_BYTES = 2_000_000, 12_000_000
NOISE_BYTES = 5_000_000
OFFLOAD, ONLOAD = 0.04, 0.06
KEY = {"model": {"config": "toy"}, "shapes": {"items": ITEMS}, "hardware": {"lanes": 2}}


def work(seconds: float, num_bytes: int) -> None:
    """Take so long, and so much memory for a moment."""
    import torch

    until = time.monotonic() + seconds
    torch.ones(num_bytes // 4)
    time.sleep(max(0.0, until - time.monotonic()))


class Teller(Worker):
    """Item n takes 2 + n % 4 rounds; how many are at work makes no difference."""

    @stage(streaming=True, expands=SAMPLES)
    def tell(self, items: Batch) -> Iterator[Batch]:
        time.sleep(ADMIT)
        left = items.repeat(SAMPLES)
        number = 0
        while len(left):
            time.sleep(ROUND)
            number += 1
            done = [row for row, item in enumerate(left.ids) if 2 + item % 4 == number]
            rest = [row for row in range(len(left)) if row not in done]
            if done:
                import torch

                out = left.select(done)
                yield out.with_columns(
                    tokens=Ragged(torch.zeros(number * len(out)), [number] * len(out))
                )
            left = left.select(rest)

    def install(self, weights: object, version: int) -> None: ...


class Judge(Worker):
    @stage
    def score(self, items: Batch) -> Batch:
        time.sleep(SCORE + SCORE_ITEM * len(items))
        return items


class Pupil(Worker):
    @stage(accumulates=True, minibatches=2)
    def learn(self, items: Batch) -> Batch:
        work(TRAIN_ITEM * len(items), TRAIN_BYTES * len(items))
        return items

    @learn.finish
    def learn_finish(self) -> None:
        work(FINISH, FINISH_BYTES)

    def weights(self) -> dict[str, object]:
        import torch

        return {"w": torch.zeros(10)}

    def offload(self) -> None:
        time.sleep(OFFLOAD)

    def onload(self) -> None:
        time.sleep(ONLOAD)

    def state_bytes(self) -> int:
        return 40


class Toy(Flow):
    teller: Teller
    judge: Judge
    pupil: Pupil

    def step(self, items: Stream) -> Stream:
        return self.pupil.learn(self.judge.score(self.teller.tell(items)))

    def sync(self) -> None:
        self.pupil.publish(self.teller)


def make_flow() -> Toy:
    return Toy(teller=Teller(), judge=Judge(), pupil=Pupil())


BATCHES = [Batch({"x": list(range(ITEMS))}) for _ in range(2)]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with local_cluster(4):
        yield


@pytest.fixture(scope="module")
def profile() -> Profile:
    said: list[str] = []
    with LanePool([LaneSpec(0), LaneSpec(1)]) as pool:
        found = measure_flow(
            make_flow, BATCHES, lanes=pool, budget_seconds=60, key=KEY, note=said.append
        )
    assert said
    assert found.visits == len(said)
    return found.profile


def test_seconds_are_those_that_the_stages_sleep(profile: Profile) -> None:
    (score,) = profile.stage("judge.score").costs
    (learn,) = profile.stage("pupil.learn").costs
    assert len(score.seconds.points) >= 3
    for items in (2, 4, 8, 16):
        assert score.seconds.at(items) == pytest.approx(SCORE + SCORE_ITEM * items, rel=0.1)
    for items in (2, 4, 8):
        assert learn.seconds.at(items) == pytest.approx(TRAIN_ITEM * items, rel=0.1)
    assert learn.finish
    assert learn.finish_seconds(1) == pytest.approx(FINISH, rel=0.1)
    assert learn.finish_seconds(2) == pytest.approx(FINISH, rel=0.1)


def test_rounds_lengths_and_sizes_are_known(profile: Profile) -> None:
    told = profile.stage("teller.tell")
    assert told.lengths
    assert (told.lengths.values[0], told.lengths.largest) == (2, 5)
    (layout,) = told.costs
    assert layout.round
    assert layout.admit
    whole = layout.admit.at(ITEMS) + sum(layout.round.at(n) for n in (16, 16, 12, 8, 4))
    assert whole == pytest.approx(ADMIT + 5 * ROUND, rel=0.1)
    assert layout.call(ITEMS) == pytest.approx(ADMIT + 5 * ROUND, rel=0.1)
    assert told.output_bytes > 0


def test_moves_publishing_and_dispatch_are_known(profile: Profile) -> None:
    (state,) = profile.workers["pupil"]
    assert state.state_bytes == 40
    assert state.offload == pytest.approx(OFFLOAD, rel=0.1)
    assert state.onload == pytest.approx(ONLOAD, rel=0.1)
    assert {entry.place for entry in profile.publish} == {"same", "node"}
    assert 0 < profile.dispatch < 0.01
    assert profile.key == KEY
    assert profile.cut_by is None


def test_memory_of_calls_is_known(profile: Profile) -> None:
    (learn,) = profile.stage("pupil.learn").costs
    assert learn.working
    for items, size in learn.working.points:
        wanted = max(items * TRAIN_BYTES, FINISH_BYTES)
        assert 0.9 * wanted < size < wanted + NOISE_BYTES
    assert learn.working.points[-1][1] > learn.working.points[0][1]


def test_a_single_lane_will_do_and_short_time_gives_what_it_can() -> None:
    found = measure_flow(make_flow, BATCHES, lanes=[LaneSpec(0)], budget_seconds=0.1)
    assert found.visits == 1
    assert found.profile.cut_by == 0.1
    (score,) = found.profile.stage("judge.score").costs
    assert score.call(16) == pytest.approx(SCORE + SCORE_ITEM * 16, rel=0.1)


def test_no_batch_is_refused() -> None:
    with pytest.raises(UserError, match="batches"):
        measure_flow(make_flow, [], lanes="cpu:1")


# --- items that change lanes ----------------------------------------------------------------------

RESUME, RESUME_UNIT = 0.1, 0.01
FAR = (2, 2, 3, 3, 4, 4, 20, 24)
"""Rounds of the items of a lane: at the switch point each lane has the last two left."""


class Walker(Worker):
    @stage(streaming=True, expands=SAMPLES, resumable=True)
    def walk(self, starts: Batch | Unfinished) -> Generator[Batch | Unfinished, Arrived, None]:
        import torch

        come: dict[int, int] = {}

        def take(arrived: Arrived) -> None:
            if isinstance(arrived, Unfinished):
                time.sleep(RESUME + RESUME_UNIT * sum(arrived.items["come"]))
                come.update(zip(arrived.items.ids, arrived.items["come"], strict=True))
            elif isinstance(arrived, Batch):
                come.update(dict.fromkeys(arrived.repeat(SAMPLES).ids, 0))

        take(starts)
        while come:
            time.sleep(ROUND)
            for item in come:
                come[item] += 1
            done = {item: n for item, n in come.items() if n == FAR[item % len(FAR)]}
            come = {item: n for item, n in come.items() if item not in done}
            path = Ragged(torch.zeros(sum(done.values())), list(done.values()))
            arrived = yield Batch({"path": path} if done else {}, list(done))
            if arrived is GIVE_BACK:
                steps = list(come.values())
                path = Ragged(torch.zeros(sum(steps)), steps)
                yield Unfinished(Batch({"come": steps, "path_so_far": path}, list(come)))
                return
            take(arrived)


class Walking(Flow):
    walker: Walker
    judge: Judge

    def step(self, items: Stream) -> Stream:
        return self.judge.score(self.walker.walk(items))


def test_what_going_on_with_begun_items_takes_is_known() -> None:
    def walking() -> Walking:
        return Walking(walker=Walker(), judge=Judge())

    graph, lanes = walking().trace(), [LaneSpec(0), LaneSpec(1)]
    every = trial_plans(graph, lanes, ITEMS)
    plans = [every[0], *(plan for plan in every if plan.mode == "together, switching")]
    with LanePool(lanes) as pool:
        session = Session(graph, pool, walking, BATCHES, plans, time.monotonic() + 20)
        for number in range(len(plans)):
            session.visit(number)
    (layout,) = fit_to(session.evidence).stage("walker.walk").costs
    assert layout.resume
    assert len(session.evidence.samples.resumed["walker.walk", 1, "cpu"]) >= 2
    units = 2 * 5  # two items, each with about five rounds behind it
    assert layout.resume.at(units) == pytest.approx(RESUME + RESUME_UNIT * units, rel=0.1)


# --- the store ------------------------------------------------------------------------------------


def nothing() -> Toy:
    raise AssertionError("was measured though it is known")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("M2FLOW_CACHE", str(tmp_path))
    return tmp_path


def test_a_stored_profile_is_found_by_its_key_alone(profile: Profile, store: Path) -> None:
    assert cached(KEY) is None
    path = keep(profile)
    assert path.parent == store / "profiles"
    assert cached(KEY) == profile
    other = {**KEY, "shapes": {"items": ITEMS + 1}}
    assert cached(other) is None
    assert stored_at(other) != path
    found, origin = obtain(nothing, nothing, nothing, KEY)
    assert found == profile
    assert str(path) in origin


def test_a_stored_file_that_cannot_be_read_counts_as_none(profile: Profile, store: Path) -> None:
    keep(profile).write_text('{"stages": {"of": "another form"}}')
    assert cached(KEY) is None


def test_what_is_measured_is_stored(store: Path) -> None:
    found, origin = obtain(make_flow, BATCHES, [LaneSpec(0)], KEY, 0.1)
    assert "measured in" in origin
    assert cached(KEY) == found
    assert list((store / "profiles").iterdir()) == [stored_at(KEY)]


def test_a_profile_that_lacks_trials_does_until_there_is_more_time(
    profile: Profile, store: Path
) -> None:
    keep(replace(profile, cut_by=Seconds(20.0)))
    for budget in (5, 20, 24):
        _, origin = obtain(nothing, nothing, nothing, KEY, budget)
        assert "cut short by its budget of 20 s" in origin
    with pytest.raises(AssertionError, match="measured though it is known"):
        obtain(nothing, nothing, nothing, KEY, 30)
    found = cached(KEY)
    assert found is not None, "whoever cannot measure takes what there is"


def test_a_file_of_something_else_is_refused_with_what_differs(
    profile: Profile, tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(to_json(profile))
    assert obtain(nothing, nothing, nothing, KEY, given=file)[0] == profile
    other = {**KEY, "hardware": {"lanes": 4}}
    with pytest.raises(UserError, match=r"hardware.lanes is 4 here and 2 there.*--reuse-profile"):
        obtain(nothing, nothing, nothing, other, given=file)
    found, origin = obtain(nothing, nothing, nothing, other, reuse=file)
    assert found == profile
    assert str(file) in origin
