"""Lanes with a limit of memory: the limit holds, and nothing that is computed changes.

The workers hold so much that the system's figures speak of them alone: what a lane's process has
had at most, above its level before anything was loaded.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import PlanError, RunFailed, UserError
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.lane.state import (
    MovableState,
    peak_resident_bytes,
    reset_peak_resident_bytes,
)
from m2flow.runtime.lane.state.memory import return_free_memory

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

STATE = 100 << 20
ITEMS, STEPS = 4, 2
LANE = LaneSpec(0, cores=(0,))


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with LanePool((LANE,)) as lanes:
        yield lanes


class Meter(Worker):
    """Loaded before the others, it knows how much more than then the process has had."""

    def load(self, place: Place) -> None:
        super().load(place)
        assert reset_peak_resident_bytes()
        self.level = peak_resident_bytes()

    @stage
    def look(self, batch: Batch) -> Batch:
        return batch

    def above(self) -> int:
        return peak_resident_bytes() - self.level


class Heavy(Worker):
    """A large state that each call changes all over, so that a stale one would be seen."""

    def __init__(self, factor: int, seconds: float = 0.0, fails_at: str = "") -> None:
        self.factor, self.seconds, self.fails_at = factor, seconds, fails_at

    def load(self, place: Place) -> None:
        super().load(place)
        self.numbers = torch.ones(STATE // 4, dtype=torch.int32)
        self.state = MovableState(lambda: [self.numbers], place)

    @stage
    def grow(self, batch: Batch) -> Batch:
        time.sleep(self.seconds)
        self.numbers.mul_(self.factor).add_(1)
        return batch.with_columns(x=batch["x"] + self.total())

    def total(self) -> int:
        return int(self.numbers[:: STATE // 64].sum())

    def offload(self) -> None:
        self.fail("offload")
        self.state.offload()

    def onload(self) -> None:
        self.fail("onload")
        self.state.onload()

    def fail(self, where: str) -> None:
        if self.fails_at == where:
            raise FileNotFoundError(f"no {where} here")

    def state_bytes(self) -> int:
        return self.state.nbytes()


class Growing(Flow):
    meter: Meter
    one: Heavy
    two: Heavy

    def step(self, items: Stream) -> Stream:
        return self.two.grow(self.one.grow(self.meter.look(items)))


def growing(**settings: Any) -> Growing:
    return Growing(meter=Meter(), one=Heavy(3), two=Heavy(5, **settings))


def plan(flow: Flow, limit: int | None) -> Plan:
    """Everything on one lane, the meter before all others."""
    spots = {name: Placement(((0,),)) for name in flow.workers}
    return Plan("custom", (replace(LANE, memory_bytes=limit),), spots)


def outputs(results: list[StepResult]) -> list[list[int]]:
    return [result.output["x"].tolist() for result in results]


def carry_out(
    flow: Growing, pool: LanePool, limit: int | None
) -> tuple[list[list[int]], int, list[StepResult]]:
    """The outputs of some steps, the bytes that they have taken at most, and all that is known."""
    with m2flow.launch(flow, items_per_step=ITEMS, plan=plan(flow, limit), lanes=pool) as run:
        results = list(run.steps(Batch({"x": torch.arange(ITEMS)}) for _ in range(STEPS)))
        above = run.worker_call("meter", "above")
    return outputs(results), above, results


def switches(results: list[StepResult]) -> list[Any]:
    return [span for result in results for span in result.spans if span.kind == "switch"]


def test_a_limit_that_holds_one_of_two_is_kept(pool: LanePool) -> None:
    """From loading to the end; without a limit both are there at once."""
    limit = STATE + (10 << 20)
    expected, freely, _ = carry_out(growing(), pool, None)
    found, above, results = carry_out(growing(), pool, limit)
    assert found == expected
    assert len(switches(results)) >= 4 * STEPS - 3
    assert freely > 1.9 * STATE
    assert 0.9 * STATE < above < 1.1 * limit


def test_a_method_that_is_no_stage_finds_its_worker_there(pool: LanePool) -> None:
    """Whoever is away is brought in, others make way, and the steps go on as if nothing was."""
    limit = STATE + (10 << 20)
    batches = [Batch({"x": torch.arange(ITEMS)}) for _ in range(STEPS)]
    found, totals = [], []
    flow = growing()
    with m2flow.launch(flow, items_per_step=ITEMS, plan=plan(flow, limit), lanes=pool) as run:
        for batch in batches:
            found.append(run.step(batch))
            totals.append([run.worker_call(name, "total") for name in ("one", "two", "one")])
        above = run.worker_call("meter", "above")
    expected, _, _ = carry_out(growing(), pool, None)
    assert outputs(found) == expected
    one, two = [1], [1]
    for _ in range(STEPS):
        one.append(one[-1] * 3 + 1)
        two.append(two[-1] * 5 + 1)
    assert totals == [[16 * a, 16 * b, 16 * a] for a, b in zip(one[1:], two[1:], strict=True)]
    assert above < 1.1 * limit


def test_an_eager_run_keeps_a_limit_too() -> None:
    limit = STATE + (10 << 20)
    batches = [Batch({"x": torch.arange(ITEMS)}) for _ in range(STEPS)]
    outcome = []
    for memory in (None, limit):
        gc.collect()
        return_free_memory()  # or the states would take what tests before this one have left
        with m2flow.launch(
            growing(), items_per_step=ITEMS, lanes=(LANE,), lane_memory=memory
        ) as run:
            results = list(run.steps(batches))
            totals = [run.worker_call(name, "total") for name in ("one", "two", "one")]
            above = run.worker_call("meter", "above")
        outcome.append((outputs(results), totals))
        assert (above < 1.1 * limit) == (memory is not None)
        assert bool(switches(results)) == (memory is not None)
    assert outcome[0] == outcome[1]


class Told(Worker):
    """Remembers what its place may take of memory."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.limit = place.memory_bytes

    @stage
    def say(self, batch: Batch) -> Batch:
        return batch.with_columns(limit=[self.limit] * len(batch))


class Telling(Flow):
    told: Told

    def step(self, items: Stream) -> Stream:
        return self.told.say(items)


def test_workers_of_an_eager_run_are_told_the_limit() -> None:
    """An engine takes its share of that for keys and values."""
    for limit in (None, 1 << 30):
        with m2flow.launch(
            Telling(told=Told()), items_per_step=2, lanes=(LANE,), lane_memory=limit
        ) as run:
            assert run.step(Batch({"x": [1, 2]})).output["limit"] == [limit] * 2


@pytest.mark.parametrize("where", ["eager", "lanes"])
def test_a_worker_that_does_not_fit_is_named_with_its_bytes(where: str, pool: LanePool) -> None:
    """Its size is known once it is loaded; what was known before is refused before."""
    flow = growing()
    places = {"lanes": (LANE,)} if where == "eager" else {"lanes": pool, "mode": "collocated"}
    with pytest.raises(PlanError) as caught:
        m2flow.launch(flow, items_per_step=ITEMS, lane_memory=50 << 20, **places)
    words = str(caught.value)
    assert "\n" not in words
    assert all(part in words for part in ("one", str(STATE), "lane 0", f"at most {50 << 20}"))


def test_a_plan_that_says_sizes_is_refused_before_anything_starts() -> None:
    flow = growing()
    made = plan(flow, STATE)
    spots = {**made.placements, "two": Placement(((0,),), state_bytes=STATE, working_bytes=1)}
    with pytest.raises(PlanError, match=rf"placements\.two.*{STATE + 1}") as caught:
        m2flow.launch(flow, items_per_step=ITEMS, plan=replace(made, placements=spots))
    assert "lane 0" in str(caught.value)


def test_a_method_cannot_be_called_while_steps_are_in_flight(pool: LanePool) -> None:
    flow = growing()
    made = replace(plan(flow, STATE + (10 << 20)), max_staleness=1)
    with m2flow.launch(flow, items_per_step=ITEMS, plan=made, lanes=pool) as run:
        steps = run.steps(Batch({"x": torch.arange(ITEMS)}) for _ in range(STEPS))
        next(steps)
        with pytest.raises(UserError, match=r"one\.total: steps are in flight"):
            run.worker_call("one", "total")
        assert len(list(steps)) == STEPS - 1


@pytest.mark.parametrize("fails_at", ["offload", "onload"])
def test_a_worker_that_cannot_be_moved_stops_the_run(fails_at: str, pool: LanePool) -> None:
    """The exception is on top, and not the deadline of what can never be begun; the lane does not
    touch a state that is not there."""
    flow = growing(fails_at=fails_at)
    limit = STATE + (10 << 20)
    assert plan(flow, limit).deadline_seconds >= 600, "longer than this test may take"
    with pytest.raises((RunFailed, FileNotFoundError)) as caught:
        carry_out(flow, pool, limit)
    error = caught.value
    if fails_at == "onload":
        assert str(error).startswith("onload of two failed on lane 0")
        assert error.__cause__ is not None
        error = error.__cause__
    assert isinstance(error, FileNotFoundError)
    assert str(error) == f"no {fails_at} here"
    assert "On lane 0:" in "\n".join(error.__notes__)
    expected, _, _ = carry_out(growing(), pool, None)  # the lanes are as good as before
    assert len(expected) == STEPS
