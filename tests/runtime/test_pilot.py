"""Mode "auto" on real lanes: it learns, races plans, and computes the same under each of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Layout, Place, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed
from m2flow.plan.profile import Profile
from m2flow.runtime.driver.auto import Auto
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.runner import Runner, StepResult
from tests.equivalence import flows

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(flows)
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS = 16
LANES = (LaneSpec(0), LaneSpec(1))


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with LanePool(LANES) as lanes:
        yield lanes


class Asker(Worker):
    """Asks a service, which takes as long for one item as for many."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @stage
    def ask(self, items: Batch) -> Batch:
        time.sleep(self.seconds)
        return items.with_columns(y=items["x"] + 1)


class Counter(Worker):
    """Takes its time for each item."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @stage
    def count(self, items: Batch) -> Batch:
        time.sleep(self.seconds * len(items))
        return items.with_columns(z=2 * items["x"])


@stage
def joined(asked: Batch, counted: Batch) -> Batch:
    return asked.with_columns(z=asked["y"] + counted["z"])


class Fork(Flow):
    """Ask and count; neither needs the other."""

    asker: Asker
    counter: Counter

    def step(self, items: Stream) -> Stream:
        return joined(self.asker.ask(items), self.counter.count(items))


def fork(ask: float, count: float) -> Fork:
    return Fork(asker=Asker(ask), counter=Counter(count))


def batches(count: int) -> list[Batch]:
    return [Batch({"x": torch.arange(ITEMS) + ITEMS * step}) for step in range(count)]


def assert_right(results: Sequence[StepResult]) -> None:
    """Whatever plans a run has tried, it has computed the same."""
    for step, result in enumerate(results):
        assert result.step == step
        assert torch.equal(result.output["z"], 3 * batches(len(results))[step]["x"] + 1)


def test_a_run_learns_its_profile_and_computes_the_same_under_every_plan(pool: LanePool) -> None:
    kept: list[Profile] = []
    auto = Auto(num_steps=40, keep=kept.append)
    flow = fork(0.2, 0.0125)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        assert run.plan.mode == "collocated"
        results, modes = [], []
        for result in run.steps(batches(20)):
            results.append(result)
            modes.append(run.plan.mode)
        assert run.pilot is not None
        assert run.pilot.race is not None
        assert run.pilot.race.over
        assert "collocated in smaller calls" in modes, "no step has told what a call costs"
        race = run.pilot.race
        assert run.plan.predicted_seconds == pytest.approx(race.believed(race.leader))
        assert run.pilot.changes
    assert kept[-1].source == "measured"
    seconds = kept[-1].stage("asker.ask").costs[0].seconds
    assert seconds.at(ITEMS) >= 0.2
    assert seconds.at(1) >= 0.19, "a call takes as long for one item"
    assert_right(results)


class Hungry(Worker):
    """Counts, and adds up what it was given; more than a few items are too many for it.

    Args:
        most: items of a call that it can bear.
        failure: what it raises when there are more; None if it only becomes slow.
    """

    def __init__(self, most: int, failure: type[Exception] | None) -> None:
        self.most, self.failure = most, failure
        self.folded = 0.0

    @stage(accumulates=True)
    def count(self, items: Batch) -> Batch:
        self.folded += float(items["x"].sum())
        if len(items) > self.most:
            if self.failure is not None:
                raise self.failure("too many items")
            time.sleep(3.0)
        return items.with_columns(z=3 * items["x"] + 1)

    @count.finish
    def count_finish(self) -> dict[str, float]:
        total = torch.tensor(self.folded)
        self.place.all_reduce([total])
        self.folded = 0.0
        return {"total": float(total)}

    def discard(self) -> None:
        self.folded = 0.0


class Careless(Hungry):
    """Does not know how to drop what it has folded in."""

    discard = Worker.discard


class Remembering(Asker):
    """Knows what it was asked in steps that are not to come again."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.known: set[int] = set()

    @stage
    def ask(self, items: Batch) -> Batch:
        asked = set(items["x"].tolist())
        assert not asked & self.known, "asked twice, and told of no failure between"
        self.known |= asked
        return items.with_columns(y=items["x"] + 1)

    def discard(self) -> None:
        self.known = set()


class Counting(Flow):
    """One counter that is trained."""

    asker: Asker
    counter: Hungry

    def step(self, items: Stream) -> Stream:
        return self.counter.count(self.asker.ask(items))


def counting(counter: Hungry) -> Counting:
    return Counting(asker=Remembering(0.0), counter=counter)


@pytest.mark.parametrize(
    ("failure", "deadline"),
    [(MemoryError, 60.0), (torch.OutOfMemoryError, 60.0), (TimeoutError, 60.0), (None, 2.0)],
)
def test_a_step_is_taken_again_under_a_plan_that_needs_less(
    pool: LanePool, failure: type[Exception] | None, deadline: float
) -> None:
    """The first plan fails after items were folded in; no item counts twice."""
    flow = counting(Hungry(3, failure))
    auto = Auto(num_steps=40, deadline_seconds=deadline)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        results = list(run.steps(batches(4)))
        assert run.pilot is not None
        assert run.pilot.changes[0].why == "failed"
    assert_right(results)
    totals = [float(batch["x"].sum()) for batch in batches(4)]
    assert [result.metrics["total"] for result in results] == totals


class Kept(Hungry):
    """Says how its state is saved."""

    def save(self) -> dict[str, torch.Tensor]:
        return {"folded": torch.tensor(self.folded)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.folded = float(state["folded"])


class Halved(Kept):
    """Counts on two lanes together; one waits for the other, which may have no room."""

    collective = True

    def layouts(self, kind: str, lanes: int) -> tuple[Layout, ...]:
        return (Layout("pair", 2),) if lanes >= 2 else ()

    @stage(accumulates=True)
    def count(self, items: Batch) -> Batch:
        if len(items) > self.most and self.place.rank:
            raise MemoryError("too many items")
        self.place.all_reduce([torch.zeros(1)])
        self.folded += float(items["x"].sum())
        return items.with_columns(z=3 * items["x"] + 1)

    @count.finish
    def count_finish(self) -> dict[str, float]:
        return super().count_finish()


def test_a_gang_of_which_one_lane_has_no_room_takes_the_step_again(pool: LanePool) -> None:
    """The other one waits for it within a collective, and does not hear that it is to stop."""
    flow = counting(Halved(4, None))
    with m2flow.launch(
        flow,
        items_per_step=ITEMS,
        mode="auto",
        lanes=pool,
        auto=Auto(num_steps=40),
        layouts={"counter": Layout("pair", 2)},
    ) as run:
        results = list(run.steps(batches(4)))
        assert run.pilot is not None
        assert run.pilot.changes[0].why == "failed"
        assert not run.losses
    assert_right(results)
    totals = [float(batch["x"].sum()) for batch in batches(4)]
    assert [result.metrics["total"] for result in results] == totals


def test_a_lane_that_is_lost_while_a_failed_step_is_stopped_comes_back(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_back, killed = Runner.take_back, list[int]()

    def killing(self: Runner, seconds: float | None = None) -> object:
        if not killed:
            killed.append(pool.addresses[1].process_id)
            os.kill(killed[0], signal.SIGKILL)
        return take_back(self, seconds)

    monkeypatch.setattr(Runner, "take_back", killing)
    flow = counting(Kept(3, MemoryError))
    auto = Auto(num_steps=40)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        results = list(run.steps(batches(4)))
        assert [loss.lane for loss in run.losses] == [1]
        assert run.pilot is not None
        assert run.pilot.changes[0].why == "failed"
    assert killed
    assert_right(results)
    totals = [float(batch["x"].sum()) for batch in batches(4)]
    assert [result.metrics["total"] for result in results] == totals


class Narrow(flows.Judge):
    """Has no room on several lanes."""

    def load(self, place: Place) -> None:
        super().load(place)
        if place.size > 1:
            raise MemoryError("no room for all of it")


class Lonely(Counter):
    """Has no room on a lane of its own."""

    def load(self, place: Place) -> None:
        super().load(place)
        if place.size == 1:
            raise MemoryError("no room for all of it")


def test_where_the_first_guess_cannot_be_loaded_another_one_is(pool: LanePool) -> None:
    scenario = flows.toy()
    flow = flows.Toy(sampler=flows.Sampler(), judge=Narrow(), learner=flows.Learner())
    items = scenario.items_per_step
    with m2flow.launch(flow, items_per_step=items, mode="auto", lanes=pool) as run:
        assert run.plan.mode == "disaggregated"
        results = list(run.steps(scenario.batches))
        states = run.worker_call_everywhere(*scenario.trained)
    outputs = [flows.output_of(result) for result in results]
    metrics = [dict(result.metrics) for result in results]
    there = flows.Outcome(outputs, states, metrics, 0)
    flows.check_same(there, flows.eager_outcome(scenario), scenario)


def test_where_no_plan_can_be_loaded_the_first_cause_is_told(pool: LanePool) -> None:
    class Nowhere(Counter):
        def load(self, place: Place) -> None:
            raise MemoryError("no room at all")

    flow = Fork(asker=Asker(0.0), counter=Nowhere(0.0))
    with pytest.raises(MemoryError, match=r"counter\.load ran out of memory .* no room at all"):
        m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool)


def test_a_plan_that_cannot_be_loaded_drops_out_of_the_race(pool: LanePool) -> None:
    """The best plan would have each worker on a lane of its own."""
    flow = Fork(asker=Asker(0.2), counter=Lonely(0.0125))
    auto = Auto(num_steps=40)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool, auto=auto) as run:
        results = list(run.steps(batches(12)))
        assert run.pilot is not None
        assert run.pilot.race is not None
        verdicts = [entrant.verdict for entrant in run.pilot.race.entrants]
        assert any("counter.load ran out of memory" in verdict for verdict in verdicts)
        assert run.pilot.race.over
    notes = [note for result in results for note in result.notes]
    assert any("cannot be loaded" in note for note in notes)
    assert_right(results)


def test_a_worker_that_cannot_drop_what_it_has_folded_ends_the_run(pool: LanePool) -> None:
    flow = counting(Careless(3, MemoryError))
    with (
        m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool) as run,
        pytest.raises(RunFailed, match=r"counter\.count .* failed on lane"),
    ):
        list(run.steps(batches(4)))


def test_a_mistake_in_a_stage_ends_the_run_under_every_plan(pool: LanePool) -> None:
    flow = counting(Hungry(3, ZeroDivisionError))
    with (
        m2flow.launch(flow, items_per_step=ITEMS, mode="auto", lanes=pool) as run,
        pytest.raises(RunFailed, match=r"counter\.count .* failed on lane"),
    ):
        list(run.steps(batches(4)))
