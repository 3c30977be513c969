"""The inline driver through `launch`: results, metrics, refusals, debugging, loops, weights."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Place, Ragged, Stream, Worker, loop, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import PlanError, RunFailed, UserError
from m2flow.runtime.driver.launch import Run


class Generator4(Worker):
    """Makes four items of each, one at a time; notes what it was given and what it installed."""

    def __init__(self) -> None:
        self.expands, self.weight = 4, 0
        self.given: list[tuple[int, ...]] = []
        self.installed: list[tuple[int, int]] = []

    @stage(streaming=True, expands="expands")
    def generate(self, prompts: Batch) -> Generator[Batch, Batch | None, None]:
        self.given.append(prompts.ids)
        pending = prompts.repeat(self.expands)
        while len(pending):
            first = pending.select([0])
            sample = torch.tensor(first.ids) % self.expands
            fed = yield first.with_columns(y=first["x"] * 2 + self.weight + sample)
            pending = pending.select(range(1, len(pending)))
            if fed is not None:
                self.given.append(fed.ids)
                more = fed.repeat(self.expands)
                pending = Batch.concat([pending, more]) if len(pending) else more

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.weight = int(weights["w"])
        self.installed.append((version, self.weight))


class Learner(Worker):
    def __init__(self) -> None:
        self.w = self.sum = self.finished = 0

    @stage
    def logprobs(self, batch: Batch) -> Batch:
        return batch.with_columns(z=batch["y"] + 1)

    @stage(accumulates=True, minibatches=2)
    def train(self, batch: Batch) -> Batch:
        self.sum += int(batch["z"].sum())
        return batch

    @train.finish
    def train_finish(self) -> dict[str, float]:
        self.w, self.finished = (self.w + self.sum) % 1000, self.finished + 1
        metrics = {"sum": float(self.sum)}
        if self.finished % 2:
            metrics["odd"] = float(self.finished)
        self.sum = 0
        return metrics

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor(self.w)}


@stage(unit="group")
def centre(batch: Batch) -> Batch:
    y = batch["y"].reshape(-1, 4)
    return batch.with_columns(a=(4 * y - y.sum(1, keepdim=True)).flatten())


class Training(Flow):
    generator: Generator4
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        samples = centre(self.generator.generate(prompts))
        return self.learner.train(self.learner.logprobs(samples))

    def evaluate(self, prompts: Stream) -> Stream:
        return self.generator.generate(prompts)

    def sync(self) -> None:
        self.learner.publish(self.generator)


def start(flow: Flow, items: int, **settings: object) -> Run:
    return m2flow.launch(flow, items_per_step=items, mode="eager", lanes="cpu:1", **settings)


def training() -> Training:
    return Training(generator=Generator4(), learner=Learner())


def prompts(count: int, first: int = 0) -> Batch:
    return Batch({"x": torch.arange(first, first + count)})


def refusal(flow: Flow, batch: Batch, **settings: object) -> str:
    """The line with which a step is refused."""
    with start(flow, len(batch), **settings) as run, pytest.raises(UserError) as caught:
        run.step(batch)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_results_and_metrics_are_those_of_plain_python() -> None:
    with start(training(), 6) as run:
        results = list(run.steps(prompts(6, step) for step in range(4)))
    w = 0
    for step, result in enumerate(results):
        y = [(step + k // 4) * 2 + w + k % 4 for k in range(24)]
        sums = [sum(v + 1 for v in half) for half in (y[:12], y[12:])]
        w = (w + sum(sums)) % 1000
        assert result.step == step
        assert result.output.ids == tuple(range(24))
        assert result.output["y"].tolist() == y
        assert result.output["z"].tolist() == [v + 1 for v in y]
        assert result.output["a"].tolist() == [-6, -2, 2, 6] * 6
        # A mean over the mini-batches that have the metric.
        assert result.metrics == {"sum": sum(sums) / 2, "odd": 2.0 * step + 1}


def test_weights_are_installed_after_each_step_with_its_version() -> None:
    flow = training()
    with start(flow, 2, first_step=5) as run:
        assert flow.generator.place.version == 5
        results = list(run.steps(prompts(2) for _ in range(3)))
    assert [result.step for result in results] == [5, 6, 7]
    assert [result.version for result in results] == [6, 7, 8]
    assert [result.staleness for result in results] == [0, 0, 0]
    assert [version for version, _ in flow.generator.installed] == [6, 7, 8]
    assert flow.generator.installed[-1] == (8, flow.learner.w)


def test_published_weights_are_counted() -> None:
    with start(training(), 2) as run:
        published = run.step(prompts(2)).published
    assert published["learner"].num_bytes == 8
    assert published["learner"].seconds > 0


def test_under_a_memory_limit_nothing_is_resident_at_the_start() -> None:
    moves: list[str] = []

    class Moving(Worker):
        @stage
        def score(self, batch: Batch) -> Batch:
            moves.append("score")
            return batch

        def offload(self) -> None:
            moves.append("offload")

        def onload(self) -> None:
            moves.append("onload")

    class MovingFlow(Flow):
        moving: Moving

        def step(self, items: Stream) -> Stream:
            return self.moving.score(items)

    plan = Plan("eager", (LaneSpec(0, memory_bytes=100),), {"moving": Placement(((0,),))})
    with m2flow.launch(MovingFlow(moving=Moving()), items_per_step=1, plan=plan) as run:
        list(run.steps([prompts(1), prompts(1)]))
    assert moves == ["offload", "onload", "score", "score"]


def test_staleness_is_unknown_where_nothing_is_published() -> None:
    with start(Doubling(), 2) as run:
        assert run.step(prompts(2)).staleness is None


class Publishing(Worker):
    def __init__(self, published: Any) -> None:
        self.published = published

    @stage(accumulates=True)
    def train(self, batch: Batch) -> None: ...

    def weights(self) -> Any:
        return self.published


class Using(Worker):
    @stage
    def use(self, batch: Batch) -> Batch:
        return batch

    def install(self, weights: Mapping[str, Any], version: int) -> None: ...


class PublishingFlow(Flow):
    publishing: Worker
    using: Worker

    def step(self, items: Stream) -> Stream:
        return self.publishing.train(self.using.use(items))  # type: ignore[attr-defined]

    def sync(self) -> None:
        self.publishing.publish(self.using)


@pytest.mark.parametrize(
    ("published", "words"),
    [
        ({"w": 1.5}, r"gives 'w', which is no tensor \(got 'float'\); expected a torch tensor"),
        ({"w": np.ones(1)}, r"gives 'w', which is no tensor \(got 'ndarray'\)"),
        ([torch.ones(1)], r"is no mapping of names to tensors \(got 'list'\)"),
        (None, r"is no mapping of names to tensors \(got 'NoneType'\)"),
    ],
)
def test_weights_that_no_other_lane_would_get_are_refused(published: Any, words: str) -> None:
    """Numbers were installed where both workers stood on a lane, and refused elsewhere."""
    flow = PublishingFlow(publishing=Publishing(published), using=Using())
    assert re.match(rf"publishing\.weights: {words}", refusal(flow, prompts(2)))


def test_weights_that_nobody_gives_or_takes_are_refused_before_the_first_step() -> None:
    class Mute(Worker):
        train = Publishing.train

    class Deaf(Worker):
        use = Using.use

    with pytest.raises(
        UserError, match=r"^publishing\.weights: .*publishes its weights to using.*define"
    ):
        start(PublishingFlow(publishing=Mute(), using=Using()), 2)
    with pytest.raises(UserError, match=r"^using\.install: .*runs on the weights of publishing"):
        start(PublishingFlow(publishing=Publishing({}), using=Deaf()), 2)


def hand_written(flow: Flow, stages: Mapping[str, StagePlan]) -> Plan:
    placements = {worker: Placement(((0,),)) for worker in flow.trace().workers}
    return Plan("eager", (LaneSpec(0),), placements, stages)


def test_a_gang_does_not_stand_in_one_process() -> None:
    """The call waited for a second lane, until its deadline."""
    flow = training()
    plan = hand_written(flow, {})
    lanes = (LaneSpec(0), LaneSpec(1))

    def under(*replicas: tuple[int, ...]) -> Plan:
        return replace(
            plan, lanes=lanes, placements=plan.placements | {"centre": Placement(replicas)}
        )

    with pytest.raises(PlanError, match=r"^centre: its lanes share each call.*\(\(0, 1\),\)"):
        start(flow, 6, plan=under((0, 1)))
    with start(flow, 6, plan=under((0,), (1,))) as run:
        assert run.step(prompts(6)).output["a"].tolist() == [-6, -2, 2, 6] * 6


def test_a_streaming_stage_is_fed_in_pieces() -> None:
    flow = training()
    plan = hand_written(flow, {"generator.generate": StagePlan(max_running=2)})
    with start(flow, 6, plan=plan) as run:
        result = run.step(prompts(6))
    with start(training(), 6) as run:
        expected = run.step(prompts(6))
    assert result.output.ids == expected.output.ids
    assert result.output["z"].tolist() == expected.output["z"].tolist()
    assert sorted(item for piece in flow.generator.given for item in piece) == list(range(6))
    assert len(flow.generator.given) > 1
    assert all(len(piece) <= 2 for piece in flow.generator.given)


def test_whole_windows_are_one_call() -> None:
    flow = training()
    with start(flow, 6) as run:
        run.step(prompts(6))
    assert flow.generator.given == [tuple(range(6))]


# --- stages that break their promise --------------------------------------------------------------


class Doubling(Flow):
    def step(self, items: Stream) -> Stream:
        return double(items)


@stage
def double(batch: Batch) -> Batch:
    return batch.with_columns(y=batch["x"] * 2)


class Careless(Worker):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    @stage
    def score(self, batch: Batch) -> object:
        match self.fault:
            case "count":
                return batch.select(range(len(batch) - 1))
            case "column":
                return batch.with_columns(reward=[0.0] * (len(batch) + 1))
            case "scalar":
                return batch.with_columns(reward=1.0)
            case "type":
                return {"reward": [0.0] * len(batch)}
            case "nothing":
                return None
            case "ids":
                return Batch(batch.columns, [item + 100 for item in batch.ids])
        raise AssertionError(self.fault)


class CarelessFlow(Flow):
    careless: Careless

    def step(self, items: Stream) -> Stream:
        return self.careless.score(items)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("count", ["careless.score: returned the wrong number of items", "got 2", "expected 3"]),
        ("type", ["careless.score: must return a Batch", "dict", "with_columns"]),
        ("nothing", ["careless.score: must return a Batch", "NoneType"]),
        ("ids", ["careless.score: returned items it was not given", "[100, 101, 102]"]),
        ("column", ["careless.score: reward: column has the wrong length", "got 4", "expected 3"]),
        ("scalar", ["reward: is not a column", "float"]),
    ],
)
def test_a_stage_that_breaks_its_promise_is_named(fault: str, words: list[str]) -> None:
    line = refusal(CarelessFlow(careless=Careless(fault)), prompts(3))
    for word in words:
        assert word in line


@stage(expands=2)
def side_by_side(batch: Batch) -> Batch:
    return Batch.concat([batch, batch])


class SideBySide(Flow):
    def step(self, items: Stream) -> Stream:
        return side_by_side(items)


def test_items_that_come_twice_are_named() -> None:
    """The line named none."""
    line = refusal(SideBySide(), prompts(3))
    assert line.startswith("side_by_side: returned items twice (got [0, 1, 2])")
    assert "Batch.repeat" in line


def test_a_column_of_the_wrong_length_shows_the_line_of_the_stage() -> None:
    flow = CarelessFlow(careless=Careless("column"))
    with start(flow, 3) as run, pytest.raises(UserError, match="reward") as caught:
        run.step(prompts(3))
    raised = caught.value.__cause__
    assert raised is not None
    assert "score" in [frame.name for frame in traceback.extract_tb(raised.__traceback__)]


class CarelessStream(Worker):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    @stage(streaming=True)
    def roll(self, batch: Batch) -> Generator[object, Batch | None, None]:
        yield batch.select([0])
        match self.fault:
            case "early":
                return
            case "twice":
                yield batch.select([0])
            case "foreign":
                yield Batch({"x": [1]}, [77])
            case "type":
                yield 3


class CarelessStreamFlow(Flow):
    careless: CarelessStream

    def step(self, items: Stream) -> Stream:
        return self.careless.roll(items)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("early", ["careless.roll: ended with 2 items not handed on", "[1, 2]"]),
        ("twice", ["careless.roll: handed on items", "[0]"]),
        ("foreign", ["careless.roll: handed on items it was not given", "[77]"]),
        ("type", ["careless.roll: must yield Batches", "int"]),
    ],
)
def test_a_stream_that_breaks_its_promise_is_named(fault: str, words: list[str]) -> None:
    line = refusal(CarelessStreamFlow(careless=CarelessStream(fault)), prompts(3))
    for word in words:
        assert word in line


class NoGenerator(Worker):
    @stage(streaming=True)
    def roll(self, batch: Batch) -> Batch:
        return batch


class NoGeneratorFlow(Flow):
    worker: NoGenerator

    def step(self, items: Stream) -> Stream:
        return self.worker.roll(items)


def test_a_streaming_stage_that_is_no_generator_is_named() -> None:
    line = refusal(NoGeneratorFlow(worker=NoGenerator()), prompts(2))
    assert "worker.roll: streams, so it must be a generator function" in line


class BrokenError(Exception):
    """An exception of the user's own, with arguments that are not a message."""

    def __init__(self, item: int, reason: str) -> None:
        super().__init__(f"{reason} at {item}")
        self.item = item


class Broken(Worker):
    @stage
    def score(self, batch: Batch) -> Batch:
        return self.look(batch)

    def look(self, batch: Batch) -> Batch:
        raise BrokenError(int(batch["x"][0]), "a bad item")


class BrokenFlow(Flow):
    broken: Broken

    def step(self, items: Stream) -> Stream:
        return self.broken.score(items)


def test_an_exception_of_a_worker_comes_up_as_it_was_raised() -> None:
    flow = BrokenFlow(broken=Broken())
    with start(flow, 2) as run, pytest.raises(BrokenError, match="a bad item at 7") as caught:
        run.step(prompts(2, 7))
    assert caught.value.item == 7
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames][-2:] == ["score", "look"]
    assert frames[-1].filename == __file__


def test_a_run_in_which_a_stage_has_raised_says_that_it_has_stopped() -> None:
    with start(BrokenFlow(broken=Broken()), 2) as run:
        for error in (BrokenError, RunFailed, RunFailed):
            with pytest.raises(error) as caught:
                run.step(prompts(2, 7))
    assert str(caught.value) == "the run has stopped already; launch the flow again"


# --- loops ----------------------------------------------------------------------------------------


class Collatz(Worker):
    @stage
    def halve(self, batch: Batch) -> Batch:
        x = batch["x"]
        turns = batch["turns"] if "turns" in batch else torch.zeros_like(x)
        return batch.with_columns(x=torch.where(x % 2 == 0, x // 2, 3 * x + 1), turns=turns + 1)

    @stage
    def judge(self, batch: Batch) -> Batch:
        return batch.with_columns(done=batch["x"] == 1)


class CollatzFlow(Flow):
    worker: Collatz
    max_turns: int | None = None

    def step(self, items: Stream) -> Stream:
        return loop(self.worker.halve, self.worker.judge, until="done", max_turns=self.max_turns)(
            items
        )


def collatz(x: int, max_turns: int | None) -> tuple[int, int]:
    """Where a number is, and after how many turns, when it reaches 1 or has had enough."""
    turns = 0
    while True:
        x, turns = x // 2 if x % 2 == 0 else 3 * x + 1, turns + 1
        if x == 1 or turns == max_turns:
            return x, turns


@pytest.mark.parametrize("max_turns", [None, 1, 10])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_a_loop_is_the_same_as_in_plain_python(max_turns: int | None, chunk: int | None) -> None:
    flow = CollatzFlow(worker=Collatz(), max_turns=max_turns)
    names = ("worker.halve", "worker.judge")
    plan = hand_written(flow, dict.fromkeys(names, StagePlan(chunk=chunk)))
    with start(flow, 20, plan=plan) as run:
        output = run.step(prompts(20, 1)).output
    assert output.ids == tuple(range(20))
    found = list(zip(output["x"].tolist(), output["turns"].tolist(), strict=True))
    assert found == [collatz(x, max_turns) for x in range(1, 21)]


class Marks(Worker):
    """Marks items from 2 on in their first turn, all others in the second; as it is told to."""

    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        self.write = write

    @stage
    def judge(self, batch: Batch) -> Batch:
        turns = batch["turns"] + 1 if "turns" in batch else torch.ones_like(batch["x"])
        return batch.with_columns(turns=turns, done=self.write((batch["x"] >= 2) | (turns > 1)))


class MarksFlow(Flow):
    marks: Marks

    def step(self, items: Stream) -> Stream:
        return loop(self.marks.judge, until="done")(items)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda done: done,
        lambda done: done[:, None],
        lambda done: done.numpy()[:, None, None],
        lambda done: done.tolist(),
        lambda done: tuple(done.tolist()),
    ],
)
def test_a_mark_may_be_one_entry_of_any_shape(
    write: Callable[[torch.Tensor], object], fused: bool
) -> None:
    flow = MarksFlow(marks=Marks(write))
    plan = replace(hand_written(flow, {}), fuse_loops=fused)
    with start(flow, 4, plan=plan) as run:
        assert run.step(prompts(4)).output["turns"].tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda done: done[:, None].expand(-1, 2),
        lambda done: done[:, None].tolist(),
        lambda done: Ragged(done, [1] * len(done)),
    ],
)
def test_marks_that_are_not_one_for_each_item_are_refused(
    write: Callable[[torch.Tensor], object], fused: bool
) -> None:
    flow = MarksFlow(marks=Marks(write))
    plan = replace(hand_written(flow, {}), fuse_loops=fused)
    message = refusal(flow, prompts(4), plan=plan)
    assert message.startswith("done: says which items leave a loop")
    assert message.endswith("expected one truth value for each item")


class TwoLoops(Flow):
    marks: Marks
    collatz: Collatz
    until: str = "done"

    def step(self, items: Stream) -> Stream:
        marked = loop(self.marks.judge, until=self.until)(items)
        return loop(self.collatz.halve, self.collatz.judge, until="done")(marked)


@pytest.mark.parametrize("fused", [True, False])
def test_marks_of_an_earlier_loop_are_refused(fused: bool) -> None:
    flow = TwoLoops(marks=Marks(lambda done: done), collatz=Collatz())
    plan = replace(hand_written(flow, {}), fuse_loops=fused)
    message = refusal(flow, prompts(2, 2), plan=plan)
    assert message.startswith(
        "loop(collatz.halve, collatz.judge): item 0 enters the loop with 'done' already true"
    )
    assert "until=" in message


# --- gradients -----------------------------------------------------------------------------------


class Wide(Worker):
    """Gives columns that torch could follow back to `weight`, and looks at such columns."""

    def load(self, place: Place) -> None:
        self.weight = torch.ones(1, requires_grad=True)
        self.followed = list[bool]()

    @stage
    def spread(self, batch: Batch) -> Batch:
        y = batch["x"] * self.weight
        return batch.with_columns(y=y, rows=Ragged(y, [1] * len(batch)), done=y < 0)

    @stage
    def look(self, batch: Batch) -> Batch:
        columns = (batch["y"], batch["rows"].values)
        self.followed += [column.requires_grad for column in columns]
        return batch.with_columns(done=torch.ones(len(batch), dtype=torch.bool))


class Spread(Flow):
    wide: Wide
    around: bool = False

    def step(self, items: Stream) -> Stream:
        if self.around:
            return loop(self.wide.spread, self.wide.look)(items)
        return self.wide.look(self.wide.spread(items))


@pytest.mark.parametrize(("around", "fused"), [(False, False), (True, False), (True, True)])
def test_no_gradient_flows_from_one_stage_to_another(around: bool, fused: bool) -> None:
    flow = Spread(wide=Wide(), around=around)
    plan = replace(hand_written(flow, {}), fuse_loops=fused)
    with start(flow, 2, plan=plan) as run:
        assert run.step(prompts(2)).output["rows"].lengths == (1, 1)
    assert flow.wide.followed == [False, False]


# --- beside the steps -----------------------------------------------------------------------------


def test_a_second_method_runs_between_steps_on_the_same_workers() -> None:
    flow = training()
    with start(flow, 2, also={"evaluate": 3}) as run:
        evaluated = run.run_method("evaluate", prompts(3))
        assert evaluated.output["y"].tolist() == [2 * (k // 4) + k % 4 for k in range(12)]
        run.step(prompts(2))
        w = flow.learner.w
        assert w > 0
        evaluated = run.run_method("evaluate", prompts(3))
        assert evaluated.output["y"].tolist() == [w + 2 * (k // 4) + k % 4 for k in range(12)]
        assert run.step(prompts(2)).step == 1  # evaluations do not count as steps


def test_breakpoint_stops_in_the_stage_in_this_process_and_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int, int, int]] = []

    def hook() -> None:
        frame = sys._getframe(1)
        here = (os.getpid(), threading.get_ident())
        seen.append((frame.f_code.co_name, len(frame.f_locals["batch"]), *here))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    with start(StoppingFlow(), 3) as run:
        run.step(prompts(3))
    assert seen == [("stop", 3, os.getpid(), threading.get_ident())]


@stage
def stop(batch: Batch) -> Batch:
    breakpoint()  # noqa: T100 - what is tested
    return batch


class StoppingFlow(Flow):
    def step(self, items: Stream) -> Stream:
        return stop(items)


def test_workers_are_the_users_own_objects_and_are_closed() -> None:
    class Closing(Worker):
        closed = False

        @stage
        def score(self, batch: Batch) -> Batch:
            return batch

        def close(self) -> None:
            self.closed = True

        def add(self, a: int, b: int) -> int:
            return a + b

    class ClosingFlow(Flow):
        closing: Closing

        def step(self, items: Stream) -> Stream:
            return self.closing.score(items)

    flow = ClosingFlow(closing=Closing())
    with start(flow, 1) as run:
        assert run.worker_call("closing", "add", 2, 3) == 5
        assert run.worker_call_everywhere("closing", "add", 2, 3) == [5]
        assert not flow.closing.closed
    assert flow.closing.closed


def test_what_a_run_does_not_have_is_named() -> None:
    with start(training(), 2, also={"evaluate": 3}) as run:
        with pytest.raises(
            UserError, match=r"^evaluat: is no method.*did you mean 'evaluate'.*also="
        ):
            run.run_method("evaluat", prompts(3))
        with pytest.raises(UserError, match=r"^lerner: is no worker.*did you mean 'learner'"):
            run.worker_call("lerner", "weights")
        with pytest.raises(UserError, match=r"^centre: is no worker"):
            run.worker_call_everywhere("centre", "weights")
        assert run.step(prompts(2)).step == 0
    with pytest.raises(UserError, match=r"^also\.step: .*items_per_step"):
        start(training(), 2, also={"step": 8})


def test_a_run_that_was_closed_says_so() -> None:
    run = start(training(), 2, also={"evaluate": 3})
    assert run.step(prompts(2)).step == 0
    run.close()
    run.close()
    for use in (
        lambda: run.step(prompts(2)),
        lambda: run.run_method("evaluate", prompts(3)),
        lambda: run.worker_call("learner", "weights"),
        lambda: run.worker_call_everywhere("learner", "weights"),
    ):
        with pytest.raises(UserError, match=r"^run: is closed; launch the flow again$"):
            use()


class Fussy(Worker):
    """Raises where it is told to; says what was done to it."""

    def __init__(self, log: list[str], name: str, *faults: str) -> None:
        self.log, self.name, self.faults = log, name, faults

    def do(self, what: str) -> None:
        self.log.append(f"{self.name} {what}")
        if what in self.faults:
            raise OSError(f"{self.name} cannot {what}")

    def load(self, place: Place) -> None:
        self.do("load")

    def state_bytes(self) -> int:
        self.do("measure")
        return 0

    def close(self) -> None:
        self.do("close")

    @stage
    def score(self, batch: Batch) -> Batch:
        return batch


class FussyFlow(Flow):
    one: Fussy
    two: Fussy

    def step(self, items: Stream) -> Stream:
        return self.two.score(self.one.score(items))


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        ("load", ["one load", "one measure", "two load", "one close"]),
        (
            "measure",
            ["one load", "one measure", "two load", "two measure", "one close", "two close"],
        ),
    ],
)
def test_workers_that_were_loaded_are_closed_where_another_cannot_be(
    fault: str, done: list[str]
) -> None:
    log, threads = list[str](), torch.get_num_threads()
    flow = FussyFlow(one=Fussy(log, "one", "close"), two=Fussy(log, "two", fault))
    with pytest.raises(OSError, match=f"two cannot {fault}"):
        start(flow, 2, num_threads=threads + 1)
    assert log == done
    assert torch.get_num_threads() == threads


def test_all_workers_are_closed_whatever_one_raises() -> None:
    log, threads = list[str](), torch.get_num_threads()
    flow = FussyFlow(one=Fussy(log, "one", "close"), two=Fussy(log, "two"))
    run = start(flow, 2, num_threads=threads + 1)
    with pytest.raises(OSError, match="one cannot close"):
        run.close()
    assert log[-2:] == ["one close", "two close"]
    assert torch.get_num_threads() == threads


# --- metrics --------------------------------------------------------------------------------------


class Two(Worker):
    """Two stages that accumulate, both of which give a `loss`, and the first more."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    @stage(accumulates=True, minibatches=2)
    def first(self, batch: Batch) -> None:
        return None

    @first.finish
    def first_finish(self) -> dict[str, float]:
        self.loss += 1
        return {"loss": self.loss, "alone": self.loss}

    @stage(accumulates=True)
    def second(self, batch: Batch) -> None:
        return None

    @second.finish
    def second_finish(self) -> dict[str, float]:
        return {"loss": -self.loss}


class TwoLearners(Flow):
    policy: Two
    critic: Two
    stages: tuple[str, ...] = ("policy.first", "critic.first")

    def step(self, items: Stream) -> Stream:
        for name in self.stages:
            worker, method = name.split(".")
            items = getattr(getattr(self, worker), method)(items)
        return items


@pytest.mark.parametrize(
    ("stages", "metrics"),
    [
        (("policy.first",), {"loss": 1.5, "alone": 1.5}),
        (
            ("policy.first", "critic.first"),
            {"policy/loss": 1.5, "policy/alone": 1.5, "critic/loss": 11.5, "critic/alone": 11.5},
        ),
        (
            ("policy.first", "policy.second"),
            {"policy.first/loss": 1.5, "alone": 1.5, "policy.second/loss": -2.0},
        ),
        (
            ("policy.second", "critic.first"),
            {"policy/loss": 0.0, "critic/loss": 11.5, "alone": 11.5},
        ),
    ],
)
def test_a_metric_that_several_stages_give_is_that_of_each(
    stages: tuple[str, ...], metrics: dict[str, float]
) -> None:
    flow = TwoLearners(policy=Two(0.0), critic=Two(10.0), stages=stages)
    with start(flow, 2) as run:
        assert run.step(prompts(2)).metrics == metrics


class Own(Two):
    """Has a `finish` of its own in place of its parent's."""

    def first_finish(self) -> dict[str, float]:
        return {"mine": 3.0, **super().first_finish()}


def test_a_subclass_may_have_a_finish_of_its_own() -> None:
    flow = TwoLearners(policy=Own(0.0), critic=Two(0.0), stages=("policy.first",))
    with start(flow, 2) as run:
        assert run.step(prompts(2)).metrics == {"mine": 3.0, "loss": 1.5, "alone": 1.5}


class Wrong(Worker):
    """Gives whatever as its metrics."""

    def __init__(self, metrics: object) -> None:
        self.metrics = metrics

    @stage(accumulates=True)
    def train(self, batch: Batch) -> None:
        return None

    @train.finish
    def train_finish(self) -> Any:
        return self.metrics


class Trains(Flow):
    worker: Wrong

    def step(self, items: Stream) -> Stream:
        return self.worker.train(items)


@pytest.mark.parametrize("value", [None, "3", torch.ones(2), [1.0]])
def test_a_metric_that_is_no_number_is_refused_by_name(value: object) -> None:
    refused = pytest.raises(UserError, match=r"^worker\.train: its finish .* metric 'odd'")
    flow = Trains(worker=Wrong({"fine": torch.tensor(2), "odd": value}))
    with start(flow, 2) as run, refused:
        run.step(prompts(2))


def test_a_finish_gives_metrics_or_nothing() -> None:
    refused = pytest.raises(UserError, match=r"^worker\.train: its finish returned no metrics")
    with start(Trains(worker=Wrong(3.0)), 2) as run, refused:
        run.step(prompts(2))
    with start(Trains(worker=Wrong({"size": torch.tensor(2)})), 2) as run:
        assert run.step(prompts(2)).metrics == {"size": 2.0}


@stage
def note(batch: Batch) -> Batch:
    large = bool((batch["x"] > 1).any())
    return batch.with_columns(reason=["large"] * len(batch)) if large else batch


@stage
def number(batch: Batch) -> Batch:
    return batch.with_columns(n=list(batch.ids))


class Noting(Flow):
    def step(self, items: Stream) -> Stream:
        return number(note(items))


def test_columns_that_follow_the_call_name_the_stage_that_gave_them() -> None:
    flow = Noting()
    line = refusal(flow, prompts(4), plan=hand_written(flow, {"note": StagePlan(chunk=2)}))
    assert line.startswith("note: has given items with different columns")
    assert "['reason']" in line
