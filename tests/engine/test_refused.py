"""What `launch` and a run are given and refuse, in one line; the run goes on where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import PlanError, UserError
from tests.engine.test_inline import (
    Careless,
    CarelessFlow,
    Doubling,
    prompts,
    start,
    training,
)


def test_a_step_of_another_number_of_items_is_refused() -> None:
    with start(Doubling(), 4) as run:
        with pytest.raises(UserError, match=r"items_per_step: .*\(got 3\); expected 4"):
            run.step(prompts(3))
        assert run.step(prompts(4)).output["y"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("given", [{"x": [1, 2]}, [{"x": 1}, {"x": 2}], None, torch.arange(2)])
def test_what_is_no_batch_is_refused(given: Any) -> None:
    """Nothing at all counted as the end of the batches, and a table as one of too few items."""
    kind = type(given).__name__
    words = rf"^batch: is of the wrong type \(got '{kind}'\); expected .*Batch\("
    with start(training(), 2, also={"evaluate": 2}) as run:
        for use in (
            lambda: run.step(given),
            lambda: list(run.steps([given])),
            lambda: run.run_method("evaluate", given),
        ):
            with pytest.raises(UserError, match=words):
                use()
        with pytest.raises(UserError, match=r"^batches: is one Batch; .*run\.step"):
            list(run.steps(prompts(2)))  # type: ignore[arg-type]
        assert run.step(prompts(2)).step == 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("flow", Doubling, r"\(got <class .*Doubling'>\); expected a Flow; .*Doubling\(\.\.\.\)"),
        ("flow", None, r"\(got 'NoneType'\); expected a Flow"),
        ("mode", None, "expected a mode, such as 'collocated'"),
        ("lanes", 2, r"\(got 2\); expected a text such as 'cpu:2', LaneSpecs or a LanePool"),
        ("lanes", [0, 1], r"\(got 0\); expected a text such as 'cpu:2', LaneSpecs or a LanePool"),
        ("lanes", [], "expected a text such as 'cpu:2', LaneSpecs or a LanePool"),
        ("plan", "plan.json", r"\(got 'plan.json'\); expected .*Plan.*m2flow\.plan\.read_plan"),
        ("also", ["evaluate"], r"\(got 'list'\); expected .*a number of items for each method"),
        ("layouts", {"double": "tp2"}, r"\.double: .*\(got 'tp2'\); expected a Layout"),
        ("layouts", "tp2", r"\(got 'tp2'\); expected a Layout for each worker"),
        ("auto", True, r"\(got True\); expected an m2flow.Auto"),
    ],
)
def test_an_argument_of_another_kind_is_refused(key: str, value: Any, words: str) -> None:
    given: dict[str, Any] = {"flow": Doubling(), "items_per_step": 4, "mode": "collocated"}
    given |= {"lanes": "cpu:1"} | {key: value}
    with pytest.raises(UserError, match=rf"^{key}.*{words}"):
        m2flow.launch(**given)


@pytest.mark.parametrize("count", [0, -1, "4", None])
def test_a_step_of_no_number_of_items_is_refused(count: Any) -> None:
    with pytest.raises(
        UserError, match=r"^items_per_step: .*expected a whole number of at least 1"
    ):
        start(Doubling(), count)
    with pytest.raises(UserError, match=r"^also\.step2: .*expected a whole number of at least 1"):
        m2flow.launch(Doubling(), items_per_step=4, also={"step2": count})
    if count is not None:
        with pytest.raises(UserError, match=r"^num_threads: .*at least 1"):
            start(Doubling(), 4, num_threads=count)
        with pytest.raises(UserError, match=r"^lane_memory: .*at least 1"):
            m2flow.launch(Doubling(), items_per_step=4, lane_memory=count)
    with start(training(), 2, also={"evaluate": 2}) as run:
        with pytest.raises(UserError, match="at least one item"):
            run.run_method("evaluate", prompts(0))
        assert run.step(prompts(2)).step == 0  # the run can go on


NO_SECONDS = [0, 0.0, -1.0, float("nan"), float("inf"), 1e7, "60", None, True]


@pytest.mark.parametrize("seconds", NO_SECONDS)
def test_a_deadline_that_is_no_time_is_refused(seconds: Any) -> None:
    """A lane would have been lost at once, or waited for without an end."""
    for mode in ("eager", "collocated"):
        with pytest.raises(UserError, match=r"^load_deadline_seconds: .*at most 1,000,000 sec"):
            m2flow.launch(
                Doubling(), items_per_step=4, mode=mode, lanes="cpu:1",
                load_deadline_seconds=seconds,
            )  # fmt: skip
    if seconds is not None:
        with pytest.raises(UserError, match=r"^auto\.deadline_seconds: .*at most 1,000,000 sec"):
            m2flow.Auto(deadline_seconds=seconds)
    if seconds is not True:
        spots = {"double": Placement(((0,),))}
        plan = Plan("eager", (LaneSpec(0),), spots, deadline_seconds=seconds)
        with pytest.raises(PlanError, match=r"^deadline_seconds: (must be positive|is too long)"):
            m2flow.launch(Doubling(), items_per_step=4, plan=plan)


@pytest.mark.parametrize("count", [-1, 0.5, "1", float("nan"), True])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    spots = {"double": Placement(((0,),))}
    plan = Plan("eager", (LaneSpec(0),), spots)
    given = ("first_step", "lane_restarts", "snapshot_every", "num_threads", "lane_memory")
    for key in given:
        for more in ({"mode": "collocated", "lanes": "cpu:1"}, {"plan": plan}):
            with pytest.raises(UserError, match=rf"^{key}: .*expected a whole number of at least"):
                m2flow.launch(Doubling(), items_per_step=4, **{key: count}, **more)  # type: ignore[arg-type]
    for key in ("max_staleness", "num_steps"):
        with pytest.raises(UserError, match=rf"^auto\.{key}: .*expected a whole number of at"):
            m2flow.Auto(**{key: count})


class ThirdsFlow(Flow):
    thirds: Thirds

    def step(self, items: Stream) -> Stream:
        return self.thirds.fold(items)


class Thirds(Worker):
    @stage(accumulates=True, minibatches=3)
    def fold(self, batch: Batch) -> None:
        return None


def test_minibatches_of_different_sizes_are_refused_by_name() -> None:
    flow = ThirdsFlow(thirds=Thirds())
    with pytest.raises(UserError, match=r"thirds\.fold: cannot cut 4 items .*mini-batches"):
        start(flow, 4)
    with start(flow, 6) as run:
        assert len(run.step(prompts(6)).output) == 6


def test_another_method_waits_for_the_steps_in_flight() -> None:
    flow = CarelessFlow(careless=Careless("none"))
    with start(flow, 3) as run:
        run._runners["step"]._submit(prompts(3))
        with pytest.raises(UserError, match="step: steps are in flight"):
            run.run_method("step", prompts(3))
