"""Switch points in plan files, checks and explanations, and the variants that have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from m2flow.errors import PlanError
from m2flow.flow import Flow, Worker, stage
from m2flow.plan import (
    LaneSpec,
    Placement,
    Plan,
    StagePlan,
    build_plan,
    describe_plan,
    plan_from_json,
    to_json,
    validate,
)
from m2flow.plan.decide import decide
from m2flow.plan.profile import Piecewise, Profile, Quantiles, StageCost, StageProfile
from m2flow.plan.simulate import simulate
from m2flow.plan.switching import FINENESS, SHARES, with_switch_points
from m2flow.plan.units import Bytes
from tests.engine.audit import audit
from tests.engine.random_cases import Case
from tests.plan.small_graphs import GRPO


class Generator(Worker):
    @stage(streaming=True, expands=4, resumable=True)
    def generate(self, items: Any) -> Any: ...


class Learner(Worker):
    @stage
    def logprobs(self, items: Any) -> Any: ...

    @stage(accumulates=True, minibatches=2)
    def train(self, items: Any) -> Any: ...


@stage
def score(items: Any) -> Any: ...


class Reasoning(Flow):
    generator: Generator
    learner: Learner

    def step(self, items: Any) -> Any:
        return self.learner.train(self.learner.logprobs(score(self.generator.generate(items))))

    def sync(self) -> None:
        self.learner.publish(self.generator)


GRAPH = Reasoning(generator=Generator(), learner=Learner()).trace()
LANES = tuple(LaneSpec(n) for n in range(4))
ITEMS = 16
COLLOCATED = build_plan("collocated", GRAPH, LANES, ITEMS)


def with_stage(plan: Plan, name: str = "generator.generate", **more: Any) -> Plan:
    stage_plan = replace(plan.stages.get(name, StagePlan()), **more)
    return replace(plan, stages={**plan.stages, name: stage_plan})


def test_a_plan_with_a_switch_point_is_read_back_and_explained() -> None:
    plan = with_stage(COLLOCATED, switch_at=0.8, keep=1)
    validate(plan, GRAPH, ITEMS)
    assert plan_from_json(to_json(plan)) == plan
    told = "when 80% of its items are done, 1 of 4 replicas go on with the rest"
    assert sum(told in line for line in describe_plan(plan, GRAPH, ITEMS)) == 1
    half = with_stage(COLLOCATED, switch_at=0.75)
    validate(half, GRAPH, ITEMS)
    assert any("2 of 4 replicas go on" in line for line in describe_plan(half, GRAPH, ITEMS))


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (with_stage(COLLOCATED, switch_at=0.0), "switch_at: is a share of the items"),
        (with_stage(COLLOCATED, switch_at=1.0), "expected between 0 and 1"),
        (with_stage(COLLOCATED, switch_at=float("nan")), "is a share of the items"),
        (with_stage(COLLOCATED, keep=1), "keep: says who goes on after a switch point, and there"),
        (with_stage(COLLOCATED, switch_at=0.5, keep=4), "expected 1 to 3 of its 4 replicas"),
        (with_stage(COLLOCATED, switch_at=0.5, keep=0), "expected 1 to 3 of its 4 replicas"),
        (with_stage(COLLOCATED, "score", switch_at=0.5), "cannot give unfinished items back"),
        (
            with_stage(build_plan("eager", GRAPH, LANES, ITEMS), switch_at=0.5),
            "generator has one replica",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(plan: Plan, what: str) -> None:
    with pytest.raises(PlanError) as caught:
        validate(plan, GRAPH, ITEMS)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stage_that_cannot_resume_has_no_switch_point() -> None:
    plan = build_plan("collocated", GRPO, LANES, ITEMS)
    with pytest.raises(PlanError, match="resumable=True"):
        validate(with_stage(plan, "gen.generate", switch_at=0.5), GRPO, ITEMS)
    assert with_switch_points(plan, GRPO) == []


def test_the_variants_of_a_collocated_plan() -> None:
    variants = with_switch_points(COLLOCATED, GRAPH)
    switches = {
        (v.stages["generator.generate"].switch_at, v.stages["generator.generate"].keep)
        for v in variants
    }
    assert switches == {(share, keep) for share in SHARES for keep in (1, 2)}
    assert len(variants) == len(switches) * len(FINENESS)
    assert {v.stages["score"].chunk for v in variants} == {4, 1}, "of a replica's 16 samples"
    for variant in variants:
        validate(variant, GRAPH, ITEMS)
        assert variant.placements == COLLOCATED.placements
        assert variant.order[0] == "generator.generate"
        assert variant.predicted_seconds is None
        for name in ("score", "learner.logprobs", "learner.train"):
            smaller, before = variant.stages[name].chunk, COLLOCATED.stages[name].chunk
            assert smaller is not None
            assert before is not None
            assert smaller <= before / 2
        audit(Case(GRAPH, variant, ITEMS, 2, 7))
    assert all(with_switch_points(variant, GRAPH) == [] for variant in variants)


def test_what_is_asked_for_is_given() -> None:
    variants = with_switch_points(COLLOCATED, GRAPH, shares=(0.6,), keeps=(3, 4, 9), pieces=(4,))
    assert [v.stages["generator.generate"].keep for v in variants] == [3]
    whole = replace(COLLOCATED, stages={})
    (kept,) = with_switch_points(whole, GRAPH, shares=(0.6,), keeps=(1,), pieces=(4,))
    assert kept.stages.keys() == {"generator.generate"}, "one call a window cannot be cut unseen"
    (cut,) = with_switch_points(whole, GRAPH, (0.6,), (1,), ITEMS, pieces=(4,))
    assert cut.stages["score"].chunk == 4
    assert cut.stages["learner.train"].chunk == 2


def test_lanes_that_only_generate_are_kept() -> None:
    spots = {
        **COLLOCATED.placements,
        "learner": Placement(((0,), (1,))),
        "score": Placement(((3,),)),
    }
    variants = with_switch_points(replace(COLLOCATED, placements=spots), GRAPH)
    assert {v.placements["generator"].replicas for v in variants} == {((2,), (0,), (1,), (3,))}
    apart = build_plan("disaggregated", GRAPH, LANES, ITEMS)
    assert with_switch_points(apart, GRAPH) == [], "nothing else stands on its lanes"


# --- simulated ------------------------------------------------------------------------------------


def line(each: float, least: float = 0.0) -> Piecewise:
    """So much for each item, beside a least price."""
    return Piecewise(((1.0, least + each), (1001.0, least + 1001 * each)))


def profile(
    sequence: float = 0.001, admit: float = 0.0, resume: Piecewise | None = None
) -> Profile:
    """Answers with a long tail; a round takes 0.1 s and so much more for each at work."""
    tail = Quantiles((5.0, 10.0, 12.0, 15.0, 20.0, 200.0))
    drawing = StageCost(1, line(1.0), round=line(sequence, 0.1), admit=line(admit), resume=resume)
    plain = {"score": 0.01, "learner.logprobs": 0.2, "learner.train": 0.6}
    stages = {
        name: StageProfile((StageCost(1, line(each)),), Bytes(1)) for name, each in plain.items()
    }
    return Profile({**stages, "generator.generate": StageProfile((drawing,), Bytes(1), tail)})


def test_where_lengths_have_a_tail_a_switch_point_gains() -> None:
    plain = build_plan("collocated", GRAPH, LANES[:2], ITEMS)
    variants = with_switch_points(plain, GRAPH, num_items=ITEMS)
    found = [simulate(GRAPH, plan, profile(), ITEMS, steps=4) for plan in variants]
    unswitched = [
        simulate(GRAPH, with_stage(plan, switch_at=None, keep=None), profile(), ITEMS, steps=4)
        for plan in (plain, *variants)
    ]
    best = min(prediction.seconds for prediction in found)
    assert best < 0.95 * min(prediction.seconds for prediction in unswitched)


def test_who_takes_items_over_pays_for_taking_them_in() -> None:
    plain = build_plan("collocated", GRAPH, LANES[:2], ITEMS)
    plan = with_stage(plain, switch_at=0.7, keep=1)
    cheap, dear = (simulate(GRAPH, plan, profile(admit=a), ITEMS, steps=4) for a in (0.0, 0.5))
    without = simulate(GRAPH, plain, profile(admit=0.5), ITEMS, steps=4)
    once = simulate(GRAPH, plain, profile(), ITEMS, steps=4)
    assert dear.seconds - cheap.seconds > without.seconds - once.seconds + 0.5


def test_the_further_items_have_come_the_more_taking_them_over_costs() -> None:
    plain = build_plan("collocated", GRAPH, LANES[:2], ITEMS)
    free, flat, dear = (
        Piecewise(((1.0, 0.0), (2.0, 0.0))),
        Piecewise(((1.0, 2.0), (2.0, 2.0))),
        line(0.01),
    )
    for switch_at in (0.5, 0.8):
        plan = with_stage(plain, switch_at=switch_at, keep=1)
        seconds = [
            simulate(GRAPH, plan, profile(admit=0.5, resume=curve), ITEMS, steps=1).seconds
            for curve in (free, flat, dear, dear.times(2.0))
        ]
        assert seconds[1] > seconds[0], "once for each time that some come"
        assert seconds[2] - seconds[0] == pytest.approx(seconds[3] - seconds[2])
    assert seconds[2] - seconds[0] > 0.01 * 4 * 10, "four of the longest items, ten units each"


def test_a_switch_point_need_not_gain_more_where_its_price_is_measured() -> None:
    """It gains 3.7 % here: more than nothing, and less than the allowance for an unknown price."""
    free = Piecewise(((1.0, 0.0), (2.0, 0.0)))
    unknown, measured = profile(sequence=0.01), profile(sequence=0.01, resume=free)
    computed = replace(measured, source="analytic")
    found = [decide(GRAPH, one, LANES[:2], ITEMS) for one in (unknown, measured, computed)]
    assert [_switches(one.chosen.plan) for one in found] == [False, True, False]
    fastest = [min(one.prediction.seconds for one in (d.chosen, *d.others)) for d in found]
    assert fastest == pytest.approx([found[1].chosen.prediction.seconds] * 3)


def _switches(plan: Plan) -> bool:
    return plan.stages["generator.generate"].switch_at is not None
