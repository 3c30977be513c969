"""Which plans are worth trying beside each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan
from m2flow.plan.prediction import Candidate, Decision, Prediction, differ
from m2flow.plan.profile import Profile
from m2flow.plan.units import Seconds

GEN, TRAIN = "gen.generate", "learner.train"
HERE, THERE = Placement(((0,),)), Placement(((1,),))
TOGETHER = Plan(
    "custom",
    (LaneSpec(0), LaneSpec(1)),
    {"gen": HERE, "learner": HERE},
    {GEN: StagePlan(4, 2), TRAIN: StagePlan(4)},
    order=(TRAIN, GEN),
)
APART = replace(TOGETHER, placements={"gen": HERE, "learner": THERE})


@pytest.mark.parametrize(
    "change",
    [
        {"placements": APART.placements},
        {"placements": {"gen": HERE, "learner": replace(HERE, layout="tp1")}},
        {"stages": {GEN: StagePlan(8, 2), TRAIN: StagePlan(4)}},
        {"stages": {GEN: StagePlan(4, 4), TRAIN: StagePlan(4)}},
        {"edges": {f"{GEN}->{TRAIN}": EdgePlan(max_items=8)}},
        {"order": ()},
        {"order": (GEN, TRAIN)},
        {"max_staleness": 1},
        {"fuse_loops": False},
    ],
    ids=str,
)
def test_each_field_of_a_plan_that_matters_is_raced(change: dict[str, Any]) -> None:
    """Of two plans that differed in order, fused loops or edges alone, one could race."""
    other = replace(TOGETHER, **change)
    assert differ(TOGETHER, other)
    assert differ(other, TOGETHER)
    told = Prediction(Seconds(1.0), Seconds(0.0), {}, {}, dict.fromkeys((GEN, TRAIN), Seconds(0.5)))
    first, second = Candidate(TOGETHER, told), Candidate(other, told)
    assert Decision(first, (second,), Profile({}), 8).shortlist(0.1) == (first, second)


@pytest.mark.parametrize(
    ("one", "change", "minor"),
    [
        (TOGETHER, {"mode": "auto", "predicted_seconds": 1.0, "deadline_seconds": 5.0}, ()),
        (TOGETHER, {"stages": {GEN: StagePlan(5, 2), TRAIN: StagePlan(3)}}, ()),
        (TOGETHER, {"placements": {"gen": THERE, "learner": THERE}}, ()),
        (APART, {"order": ()}, ()),
        (TOGETHER, {"order": ()}, (TRAIN,)),
    ],
    ids=str,
)
def test_what_makes_no_difference_is_not_tried(
    one: Plan, change: dict[str, Any], minor: tuple[str, ...]
) -> None:
    other = replace(one, **change)
    assert not differ(one, other, minor)
    assert not differ(other, one, minor)
