"""Equal lanes folded: what a plan takes on a part of the lanes, and on all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from statistics import fmean

import pytest

from m2flow.flow.worker import Layout
from m2flow.plan.choose import choose
from m2flow.plan.choose.draft import to_plan
from m2flow.plan.choose.folding import fold_of, folded
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.choose.structures import starts
from m2flow.plan.explain import explained
from m2flow.plan.profile import Quantiles
from m2flow.plan.simulate import simulate
from m2flow.plan.validate import validate
from tests.plan.choose.test_choose import waiting
from tests.plan.random_cases import lanes_of
from tests.plan.small_graphs import GRPO


@pytest.mark.parametrize(("count", "items", "fold"), [(16, 64, 1), (64, 128, 4), (66, 128, 4)])
def test_a_folded_plan_takes_as_long_as_the_whole(count: int, items: int, fold: int) -> None:
    problem = PlanningProblem(GRPO, waiting(), lanes_of({"cpu": count}), items)
    assert fold_of(problem) == fold
    small = folded(problem, fold)
    for draft in islice(starts(small), 0, 30, 6):
        part = simulate(GRPO, to_plan(small, draft), small.profile, small.num_items)
        whole = simulate(GRPO, to_plan(problem, draft.times(fold)), problem.profile, items)
        assert part.seconds == pytest.approx(whole.seconds, rel=0.05)


def test_a_choice_on_many_lanes_is_a_plan_for_all_of_them() -> None:
    lanes = lanes_of({"cpu": 256})
    found = choose(GRPO, waiting(), lanes, 512, effort=20)
    plan, prediction = found.chosen.plan, found.chosen.prediction
    validate(plan, GRPO, 512)
    assert plan.lanes == lanes
    assert prediction.idle.keys() == {lane.id for lane in lanes}
    total = prediction.seconds * len(lanes)
    assert sum(prediction.terms.values()) == pytest.approx(total, rel=1e-6)


def test_a_mode_that_does_not_fold_is_judged_on_all_lanes() -> None:
    """Nine replicas of four lanes are no two equal parts: the mode was refused, for 18 lanes."""
    profile, shards = waiting(), Layout("fsdp4", 4)
    train = profile.stage("learner.train")
    divided = replace(train, costs=(replace(train.costs[0], lanes=4, layout="fsdp4"),))
    profile = replace(profile, stages={**profile.stages, "learner.train": divided})
    lanes = lanes_of({"cpu": 36})
    found = choose(GRPO, profile, lanes, 128, layouts={"learner": shards}, effort=20)
    assert found.fold == 2
    every = {one.plan.mode: one for one in (found.chosen, *found.others)}
    collocated = every["collocated"]
    assert "collocated" not in found.ruled_out
    assert len(collocated.plan.placements["learner"].replicas) == 9
    assert collocated.plan.lanes == lanes
    simulated = simulate(GRPO, collocated.plan, profile, 128, steps=1)
    assert collocated.prediction.seconds == pytest.approx(simulated.seconds, rel=0.1)
    assert collocated.prediction.idle.keys() == {lane.id for lane in lanes}
    assert collocated.part is None


def test_lanes_are_drawn_as_busy_as_they_are_predicted() -> None:
    """All but one lane of each fold were drawn idle, and the bottleneck named the others alone."""
    profile = waiting()
    even = replace(profile.stage("gen.generate"), lengths=Quantiles((10.0, 10.0)))
    alike = replace(profile, stages={**profile.stages, "gen.generate": even})
    found = choose(GRPO, alike, lanes_of({"cpu": 256}), 512, effort=20)  # all steps are the same
    why = explained(found, GRPO)
    assert sorted(lane for row in why.timeline.rows for lane in row.lanes) == list(range(256))
    for row in why.timeline.rows:
        predicted = fmean(found.chosen.prediction.idle[lane] for lane in row.lanes)
        assert row.idle == pytest.approx(predicted, abs=0.01)
    assert len(why.bottleneck.lanes) % found.fold == 0
