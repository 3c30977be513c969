"""The runner's loop with a carrier that does nothing: what is heard together counts together."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from m2flow.engine.core import Engine
from m2flow.engine.messages import (
    CallFinished,
    Command,
    CompleteStep,
    ItemsProduced,
    LaneLost,
    LaneRestarted,
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
)
from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import CannotHeal, RunFailed, UserError
from m2flow.flow import Batch, Flow, Stream, Worker, stage
from m2flow.runtime.driver import runner
from m2flow.runtime.driver.runner import Runner
from m2flow.runtime.lane.reports import Report

ITEMS = 4


class Learner(Worker):
    @stage(accumulates=True, minibatches=2)
    def train(self, b: Any) -> Any: ...

    @train.finish
    def train_finish(self) -> dict[str, float]: ...


class Judge(Worker):
    @stage
    def look(self, b: Any) -> Any: ...


class Toy(Flow):
    learner: Learner
    judge: Judge

    def step(self, items: Stream) -> Stream:
        return self.judge.look(self.learner.train(items))


GRAPH = Toy(learner=Learner(), judge=Judge()).trace()
PLAN = Plan(
    "custom",
    (LaneSpec(0), LaneSpec(1)),
    {"learner": Placement(((0,), (1,))), "judge": Placement(((1,),))},
    {"learner.train": StagePlan(1), "judge.look": StagePlan(2)},
)


def ends(call: RunCall) -> tuple[ItemsProduced, CallFinished]:
    """A call hands its items on, and ends."""
    items = tuple(item for part in call.inputs[0][0] for item in part.items)
    return ItemsProduced(call.call, call.lanes[0], items), CallFinished(call.call, call.lanes[0])


def test_the_end_of_a_call_comes_before_what_its_last_items_start() -> None:
    """The judge would take a lane for which `finish` would then have to wait."""
    engine = Engine(GRAPH, PLAN)
    first, second = engine.handle(StepSubmitted(0, ITEMS))
    assert isinstance(first, RunCall)
    assert isinstance(second, RunCall)
    started = [*engine.handle(*ends(second)), *engine.handle(*ends(first))]
    assert [type(command) for command in started if not isinstance(command, ReleaseItems)] == [
        RunFinish
    ]


@dataclass
class Echo:
    """Says that everything has been done; of several calls the last one first."""

    carried_out: list[str] = field(default_factory=list)
    _open: list[RunCall | RunFinish] = field(default_factory=list)

    def submit(self, flow: str, step: int, batch: Batch, recalled: Mapping[int, Batch]) -> None: ...

    def carry_out(self, flow: str, command: Command) -> None:
        if isinstance(command, RunCall | RunFinish):
            what = "finish" if isinstance(command, RunFinish) else GRAPH.nodes[command.node].name
            self.carried_out.append(what)
            self._open.append(command)

    def wait(self, seconds: float) -> list[Report]:
        reports: list[Report] = []
        for command in reversed(self._open):
            if isinstance(command, RunCall):
                reports += map(Report, ends(command))
            else:
                reports += [Report(CallFinished(command.call, lane)) for lane in command.lanes]
        self._open = []
        return reports

    def collect(self, flow: str, command: CompleteStep) -> Future[Batch]:
        output: Future[Batch] = Future()
        output.set_result(Batch({"x": list(range(ITEMS))}))
        return output

    def drop(self, flow: str, step: int) -> None: ...


def test_all_reports_of_a_wait_are_taken_in_before_anything_starts() -> None:
    carrier = Echo()
    result = Runner("step", GRAPH, PLAN, carrier).step(Batch({"x": list(range(ITEMS))}))
    assert len(result.output) == ITEMS
    train = ["learner.train"] * 2
    assert carrier.carried_out[:3] == [*train, "finish"]
    assert sorted(carrier.carried_out[3:]) == sorted([*train, "finish", "judge.look", "judge.look"])


def test_seconds_of_steps_that_overlap_add_up_to_the_time_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's own span would count the time of two steps in flight twice."""
    now = 100.0
    monkeypatch.setattr(runner.time, "time", lambda: now)

    class Slow(Echo):
        def wait(self, seconds: float) -> list[Report]:
            nonlocal now
            now += 1.0
            return super().wait(seconds)

    batches = [Batch({"x": list(range(ITEMS))}) for _ in range(6)]
    slow = replace(PLAN, max_staleness=2)
    steps = Runner("step", GRAPH, slow, Slow(), clock=lambda: now)
    results = list(steps.run(batches))
    assert len(results) == len(batches)
    assert sum(result.seconds for result in results) == now - 100.0
    for before, after in pairwise(results):
        assert after.started == before.started + before.seconds


def test_a_step_is_measured_by_a_clock_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds below 0 had a race between plans drop all of them."""
    passed, wall = 100.0, 5000.0
    monkeypatch.setattr(runner.time, "time", lambda: wall)

    class SetBack(Echo):
        def wait(self, seconds: float) -> list[Report]:
            nonlocal passed, wall
            passed, wall = passed + 1.0, wall - 600.0
            return super().wait(seconds)

    steps = Runner("step", GRAPH, PLAN, SetBack(), clock=lambda: passed)
    batch = Batch({"x": list(range(ITEMS))})
    result = steps.step(batch)
    assert result.seconds == passed - 100.0
    assert result.started + result.seconds == wall
    steps.go_on(wall - 7.0, [])
    before = passed
    assert steps.step(batch).seconds == passed - before + 7.0
    steps.go_on(wall + 600.0, [])
    before = passed
    assert steps.step(batch).seconds == passed - before, "begun before the clock was set back"


# --- what must not go wrong -----------------------------------------------------------------------


def test_a_batch_that_is_refused_leaves_the_runner_usable() -> None:
    """The steps before it come to their end, and further ones can be run."""
    steps = Runner("step", GRAPH, replace(PLAN, max_staleness=1), Echo())
    good = Batch({"x": list(range(ITEMS))})
    results = steps.run([good, Batch({"x": [1, 2, 3]}), good])
    assert next(results).step == 0
    with pytest.raises(UserError, match="cannot cut 3 items"):
        next(results)
    assert not steps.busy
    assert [result.step for result in steps.run([good, good])] == [1, 2]


class Slowly(Echo):
    """Gives the output of a step when nothing else happens any more."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Future[Batch]] = []

    def collect(self, flow: str, command: CompleteStep) -> Future[Batch]:
        self.outputs.append(Future())
        self.carried_out.append(f"collect {command.step}")
        return self.outputs[-1]

    def wait(self, seconds: float) -> list[Report]:
        reports = super().wait(seconds)
        while not reports and self.outputs:
            self.outputs.pop(0).set_result(Batch({"x": list(range(ITEMS))}))
        return reports


def test_reading_what_a_step_returns_does_not_hold_up_the_step_after_it() -> None:
    carrier = Slowly()
    good = Batch({"x": list(range(ITEMS))})
    steps = Runner("step", GRAPH, replace(PLAN, max_staleness=1), carrier)
    assert len(next(steps.run([good, good])).output) == ITEMS
    after = carrier.carried_out.index("collect 0")
    assert "finish" in carrier.carried_out[after:], "the second step went on meanwhile"


def test_an_output_that_was_lost_with_a_lane_that_is_back_is_made_again() -> None:
    """No lane was missed any more when it could not be read, and the run ended."""

    class Forgetful(Echo):
        def collect(self, flow: str, command: CompleteStep) -> Future[Batch]:
            output: Future[Batch] = Future()
            output.set_exception(OSError("lane 1 is gone"))
            return output

        def wait(self, seconds: float) -> list[Report]:
            lost = [] if seconds else [Report(LaneLost(1, "gone")), Report(LaneRestarted(1, 1))]
            return super().wait(seconds) + lost

    steps = Runner("step", GRAPH, PLAN, Forgetful(), heal=True)
    with pytest.raises(CannotHeal, match="the output of step 0 cannot be read"):
        steps.step(Batch({"x": list(range(ITEMS))}))


class Talkative(Echo):
    """Lane 0 talks all the time; lane 1 is silent."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock, self.calls = clock, dict[int, RunCall]()

    def carry_out(self, flow: str, command: Command) -> None:
        if isinstance(command, RunCall):
            self.calls[command.lanes[0]] = command

    def wait(self, seconds: float) -> list[Report]:
        self.clock[0] += 1.0
        assert self.clock[0] < 60.0, "nobody is judged"
        return [Report(ItemsProduced(self.calls[0].call, 0, ()))]


def test_the_silence_of_one_lane_is_judged_while_others_talk() -> None:
    clock = [0.0]
    limited = replace(PLAN, deadline_seconds=5.0)
    runner = Runner("step", GRAPH, limited, Talkative(clock), clock=lambda: clock[0])
    with pytest.raises(RunFailed, match="has not finished within its deadline of 5 s"):
        runner.step(Batch({"x": list(range(ITEMS))}))
    assert clock[0] <= 7


def test_nobody_is_judged_for_a_silence_in_which_nobody_listened() -> None:
    """A breakpoint, or a long evaluation between two steps."""
    clock = [0.0]

    class Away(Echo):
        def wait(self, seconds: float) -> list[Report]:
            if not self.carried_out[3:]:
                clock[0] += 1000.0
            return super().wait(seconds)

    limited = replace(PLAN, deadline_seconds=50.0)
    runner = Runner("step", GRAPH, limited, Away(), clock=lambda: clock[0])
    clock[0] += 1000.0
    assert len(runner.step(Batch({"x": list(range(ITEMS))})).output) == ITEMS
