"""A flow whose stages take known times, measured on real lanes; and profiles that are kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow import Batch, Flow, Stream, UserError, Worker, stage
from m2flow.engine.plan import LaneSpec
from m2flow.flow import Ragged
from m2flow.plan.file import to_json
from m2flow.plan.profile import Profile
from m2flow.plan.profile.evidence import Evidence
from m2flow.plan.profile.learning import fitted
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.profiling import cached, keep, profile_flow, stored_at
from m2flow.runtime.profiling.stored import given
from tests.runtime.local_cluster import local_cluster

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS, SAMPLES = 8, 2
ROUND, ADMIT = 0.01, 0.03
SCORE, SCORE_ITEM = 0.02, 0.004
TRAIN_ITEM, FINISH = 0.012, 0.05
TRAIN_BYTES, FINISH_BYTES = 16_000_000, 96_000_000
BESIDE_BYTES = 70_000_000
NOISE_BYTES = 5_000_000
OFFLOAD, ONLOAD = 0.04, 0.06
KEY = {"model": {"config": "toy"}, "shapes": {"items": ITEMS}, "hardware": {"lanes": 2}}


def assert_slept(measured: float, seconds: float) -> None:
    """What was measured is not less than what was slept; it may be more on a busy machine."""
    assert 0.9 * seconds <= measured <= 3 * seconds


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

    def beside_bytes(self) -> int:
        return BESIDE_BYTES


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
        found = profile_flow(
            make_flow, BATCHES, lanes=pool, budget_seconds=25, key=KEY, note=said.append
        )
    assert said
    return found


def test_seconds_are_those_that_the_stages_sleep(profile: Profile) -> None:
    (score,) = profile.stage("judge.score").costs
    (learn,) = profile.stage("pupil.learn").costs
    assert len(score.seconds.points) >= 3
    for items in (2, 4, 8, 16):
        assert_slept(score.seconds.at(items), SCORE + SCORE_ITEM * items)
    for items in (2, 4, 8):
        assert_slept(learn.seconds.at(items), TRAIN_ITEM * items)
    assert learn.finish
    assert_slept(learn.finish_seconds(1), FINISH)
    assert_slept(learn.finish_seconds(2), FINISH)


def test_rounds_lengths_and_sizes_are_known(profile: Profile) -> None:
    told = profile.stage("teller.tell")
    assert told.lengths
    assert (told.lengths.values[0], told.lengths.largest) == (2, 5)
    (layout,) = told.costs
    assert layout.round
    assert layout.admit
    whole = layout.admit.at(ITEMS) + sum(layout.round.at(n) for n in (16, 16, 12, 8, 4))
    assert_slept(whole, ADMIT + 5 * ROUND)
    assert_slept(layout.call(ITEMS), ADMIT + 5 * ROUND)
    assert told.output_bytes > 0


def test_moves_publishing_and_dispatch_are_known(profile: Profile) -> None:
    (state,) = profile.workers["pupil"]
    assert state.state_bytes == 40
    assert_slept(state.offload, OFFLOAD)
    assert_slept(state.onload, ONLOAD)
    assert {entry.place for entry in profile.publish} == {"same", "node"}
    assert profile.dispatch + profile.event_overhead > 0
    assert profile.key == KEY


def test_memory_of_calls_is_known(profile: Profile) -> None:
    (learn,) = profile.stage("pupil.learn").costs
    assert learn.working
    for items, size in learn.working.points:
        wanted = max(items * TRAIN_BYTES, FINISH_BYTES)
        assert 0.9 * wanted < size < wanted + NOISE_BYTES
    assert learn.working.points[-1][1] > learn.working.points[0][1]
    (score,) = profile.stage("judge.score").costs
    assert score.working
    for _, size in score.working.points:
        assert BESIDE_BYTES <= size < BESIDE_BYTES + NOISE_BYTES


def test_a_single_lane_will_do_and_short_time_gives_what_it_can() -> None:
    found = profile_flow(make_flow, BATCHES, lanes=[LaneSpec(0)], budget_seconds=0.1)
    (score,) = found.stage("judge.score").costs
    assert_slept(score.call(16), SCORE + SCORE_ITEM * 16)


def test_no_batch_is_refused() -> None:
    with pytest.raises(UserError, match="batches"):
        profile_flow(make_flow, [], lanes="cpu:1")


def test_an_ordinary_run_teaches_its_profile() -> None:
    """Step by step, from nothing, and each time on top of what is known."""
    with launch(make_flow(), items_per_step=ITEMS, mode="collocated", lanes="cpu:2") as run:
        steps = list(run.steps([*BATCHES, *BATCHES]))
        graph, plan = run.graph, run.plan
    known = None
    for step in steps[1:]:
        evidence = Evidence(graph)
        evidence.add(plan, [step])
        known = fitted(evidence, known)
    assert known is not None
    (score,) = known.stage("judge.score").costs
    items = score.seconds.points[0][0]
    assert_slept(score.call(items), SCORE + SCORE_ITEM * items)
    (learner,) = known.stage("pupil.learn").costs
    assert_slept(learner.finish_seconds(2), FINISH)
    assert known.source == "measured"


# --- the store ------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("M2FLOW_CACHE", str(tmp_path))
    return tmp_path


def test_a_stored_profile_is_found_by_its_key_alone(profile: Profile, store: Path) -> None:
    assert cached(KEY) is None
    path = keep(profile)
    assert path == stored_at(KEY)
    assert list((store / "profiles").iterdir()) == [path]
    assert cached(KEY) == profile
    other = {**KEY, "shapes": {"items": ITEMS + 1}}
    assert cached(other) is None
    assert stored_at(other) != path


def test_a_stored_file_that_cannot_be_read_counts_as_none(profile: Profile, store: Path) -> None:
    keep(profile).write_text('{"stages": {"of": "another form"}}')
    assert cached(KEY) is None


def test_a_file_of_something_else_is_refused_with_what_differs(
    profile: Profile, tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(to_json(profile))
    assert given(file, KEY) == profile
    other = {**KEY, "hardware": {"lanes": 4}}
    with pytest.raises(UserError, match=r"hardware.lanes is 4 here and 2 there.*--reuse-profile"):
        given(file, other)
    assert given(file, other, whatever_its_key=True) == profile
