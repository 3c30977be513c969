"""The promise of the macro flow: every plan gives the result of the eager run, exactly.

Workers count in whole numbers, read the state that others change, and do so in an order that a
plan could get wrong in many ways: chunks, feeding, limits of edges, memory limits, preference.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import m2flow
from m2flow import Batch, Flow, Stream, Worker, loop, stage
from m2flow.engine import Plan, StagePlan
from m2flow.errors import RunFailed, UserError
from m2flow.plan import build_plan, parse_lanes, validate
from m2flow.runtime.driver.runner import StepResult
from tests.engine.random_cases import plans

MODULUS = 10_007


class Resident(Worker):
    """Refuses to work while its state is put away."""

    resident = True

    def offload(self) -> None:
        assert self.resident
        self.resident = False

    def onload(self) -> None:
        self.resident = True


class Policy(Resident):
    def __init__(self) -> None:
        self.w, self.version = 1, 0

    @stage(streaming=True, expands=2)
    def sample(self, batch: Batch) -> Generator[Batch, Batch | None, None]:
        pending = [batch.repeat(2).select([row]) for row in range(2 * len(batch))]
        while pending:
            assert self.resident
            one = pending.pop()  # the last one first: nothing may depend on it
            y = [
                (x * 31 + item * 7 + self.w) % MODULUS
                for x, item in zip(one["x"], one.ids, strict=True)
            ]
            fed = yield one.with_columns(y=y, version=[self.version])
            if fed is not None:
                pending += [fed.repeat(2).select([row]) for row in range(2 * len(fed))]

    @stage
    def judge(self, batch: Batch) -> Batch:
        assert self.resident
        return batch.with_columns(judged=[(y + self.w) % MODULUS for y in batch["y"]])

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        assert self.resident
        self.w, self.version = int(weights["w"]), version


class Learner(Resident):
    """Reads its weights before, between and after its mini-batches."""

    def __init__(self) -> None:
        self.w, self.folded = 1, 0

    @stage
    def logprobs(self, batch: Batch) -> Batch:
        assert self.resident
        return batch.with_columns(old=[(a * self.w) % MODULUS for a in batch["centred"]])

    @stage
    def turn(self, batch: Batch) -> Batch:
        left = [old // 3 + self.w % 2 for old in batch["old"]]
        return batch.with_columns(old=left, done=[old < 50 for old in left])

    @stage(accumulates=True, minibatches=2)
    def train(self, batch: Batch) -> Batch:
        assert self.resident
        pairs = zip(batch["old"], batch.ids, strict=True)
        self.folded += sum(old * (1 + item) for old, item in pairs)
        return batch

    @train.finish
    def train_finish(self) -> dict[str, float]:
        assert self.resident
        self.w = (self.w * 17 + self.folded) % MODULUS
        self.folded = 0
        return {"w": float(self.w)}

    @stage
    def value(self, batch: Batch) -> Batch:
        return batch.with_columns(value=[(y * self.w) % MODULUS for y in batch["y"]])

    def weights(self) -> Mapping[str, torch.Tensor]:
        assert self.resident
        return {"w": torch.tensor(self.w)}


@stage(unit="group")
def centre(batch: Batch) -> Batch:
    y = batch["y"]
    pairs = [(y[k] + y[k ^ 1]) % MODULUS for k in range(len(y))]
    return batch.with_columns(centred=pairs)


class Training(Flow):
    policy: Policy
    learner: Learner

    def step(self, x: Stream) -> Stream:
        x = self.policy.sample(x)
        x = self.learner.logprobs(centre(x))
        x = loop(self.learner.turn, until="done")(x)
        x = self.learner.train(x)
        return self.policy.judge(self.learner.value(x))

    def sync(self) -> None:
        self.learner.publish(self.policy)


GRAPH = Training(policy=Policy(), learner=Learner()).trace()
ITEMS = 4


def training() -> Training:
    return Training(policy=Policy(), learner=Learner())


def batch(step: int, items: int = ITEMS) -> Batch:
    return Batch({"x": [step * 100 + k for k in range(items)]})


def results(plan: Plan, steps: int = 3) -> list[StepResult]:
    with m2flow.launch(training(), items_per_step=ITEMS, plan=replace(plan, mode="eager")) as run:
        return list(run.steps(batch(step) for step in range(steps)))


EAGER_PLAN = build_plan("eager", GRAPH, parse_lanes("cpu:1"), ITEMS)


@pytest.fixture(scope="module")
def eager() -> list[StepResult]:
    return results(EAGER_PLAN)


def on_single_lanes(plan: Plan) -> Plan:
    """In one process there is one copy of each worker; memory has room for two of them."""
    placements = {
        worker: replace(spot, replicas=((spot.lanes[0],),))
        for worker, spot in plan.placements.items()
    }
    least = sum(sorted(spot.state_bytes for spot in placements.values())[-2:])
    least += max(spot.working_bytes for spot in placements.values())
    lanes = tuple(
        lane if lane.memory_bytes is None else replace(lane, memory_bytes=least)
        for lane in plan.lanes
    )
    return replace(plan, placements=placements, lanes=lanes, max_staleness=0)


def test_the_toy_depends_on_the_order_of_things(eager: list[StepResult]) -> None:
    """What each rule of the engine keeps apart makes a difference here."""
    assert len({result.metrics["w"] for result in eager}) == 3
    assert eager[1].output["version"] == [1] * 8
    assert eager[0].output["judged"] != eager[1].output["judged"]


@given(plans(GRAPH, ITEMS).map(on_single_lanes))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_plan_gives_the_eager_result(eager: list[StepResult], plan: Plan) -> None:
    validate(plan, GRAPH, ITEMS)
    for ours, theirs in zip(results(plan), eager, strict=True):
        assert ours.output.ids == theirs.output.ids
        assert ours.output.columns == theirs.output.columns
        assert ours.metrics == theirs.metrics
        assert ours.version == theirs.version
        assert ours.staleness == theirs.staleness == 0


# --- the runner ---------------------------------------------------------------------------------

STALE = replace(EAGER_PLAN, max_staleness=1)


def stale_run() -> m2flow.Run:
    return m2flow.launch(training(), items_per_step=ITEMS, plan=STALE)


def test_results_come_in_order_with_steps_in_flight() -> None:
    with stale_run() as run:
        found = list(run.steps(batch(step) for step in range(5)))
    assert [result.step for result in found] == list(range(5))
    assert [result.version for result in found] == [1, 2, 3, 4, 5]
    assert all(result.staleness is not None for result in found)
    assert all(0 <= (result.staleness or 0) <= 1 for result in found)


def test_results_of_an_earlier_call_are_not_given_for_another() -> None:
    with stale_run() as run:
        steps = run.steps(batch(step) for step in range(4))
        assert next(steps).step == 0
        with pytest.raises(UserError, match=r"step: steps of an earlier call are still in flight"):
            run.step(batch(9))
        assert [result.step for result in steps] == [1, 2, 3]
        assert run.step(batch(9)).step == 4


class Failing(Worker):
    @stage
    def score(self, b: Batch) -> Batch:
        raise ZeroDivisionError("by zero")


class FailingFlow(Flow):
    failing: Failing

    def step(self, x: Stream) -> Stream:
        return self.failing.score(x)


class SlowFlow(Flow):
    slow: Any

    def step(self, x: Stream) -> Stream:
        return self.slow.second(self.slow.first(x))


class Slow(Worker):
    """Two calls that each take longer than the deadline of the plan."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    @stage
    def first(self, b: Batch) -> Batch:
        self.clock[0] += 1000.0
        return b

    @stage
    def second(self, b: Batch) -> Batch:
        self.clock[0] += 1000.0
        return b


def test_a_call_that_has_ended_is_not_past_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an hour at a breakpoint: in one process nobody can tell the time meanwhile."""
    clock = [0.0]
    with m2flow.launch(SlowFlow(slow=Slow(clock)), items_per_step=2, lanes="cpu:1") as run:
        assert run.plan.deadline_seconds < 1000
        assert len(run.step(Batch({"x": [1, 2]})).output) == 2


class Silent:
    """A carrier whose lanes never answer."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def submit(self, *_: object) -> None: ...

    def carry_out(self, *_: object) -> None: ...

    def wait(self, seconds: float) -> list[Any]:
        self.clock[0] += seconds
        return []


def test_a_run_that_has_stopped_does_not_go_on() -> None:
    from m2flow.runtime.driver.runner import Runner

    clock = [0.0]
    graph = FailingFlow(failing=Failing()).trace()
    plan = build_plan("eager", graph, parse_lanes("cpu:1"), 2)
    carrier: Any = Silent(clock)
    limited = replace(plan, deadline_seconds=5.0)
    runner = Runner("step", graph, limited, carrier, clock=lambda: clock[0])
    with pytest.raises(RunFailed, match=r"failing\.score .* has not finished within its deadline"):
        runner.step(Batch({"x": [1, 2]}))
    assert clock[0] <= 6
    with pytest.raises(RunFailed, match="has stopped already"):
        runner.step(Batch({"x": [1, 2]}))


def test_a_batch_without_columns_has_no_items() -> None:
    flow = FailingFlow(failing=Failing())
    with (
        m2flow.launch(flow, items_per_step=2, lanes="cpu:1") as run,
        pytest.raises(UserError, match="at least one item"),
    ):
        run.step(Batch({}, ids=[0, 1]))


def test_a_streaming_stage_that_joins_streams_is_not_fed_half_of_them() -> None:
    class Pair(Worker):
        @stage
        def left(self, b: Batch) -> Batch:
            return b.with_columns(left=b["x"])

        @stage(streaming=True)
        def both(self, a: Batch, b: Batch) -> Generator[Batch, Batch | None, None]:
            for row in range(len(a)):
                fed = yield a.select([row]).with_columns(sum=[a["left"][row] + b["x"][row]])
                assert fed is None

    class Pairs(Flow):
        pair: Pair

        def step(self, x: Stream) -> Stream:
            return self.pair.both(self.pair.left(x), x)

    flow = Pairs(pair=Pair())
    plan = build_plan("eager", flow.trace(), parse_lanes("cpu:1"), 5)
    plan = replace(plan, stages={"pair.both": StagePlan(max_running=2)})
    with m2flow.launch(flow, items_per_step=5, plan=plan) as run:
        output = run.step(Batch({"x": [1, 2, 3, 4, 5]})).output
    assert output["sum"] == [2, 4, 6, 8, 10]
