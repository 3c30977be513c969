"""What would flip a choice is what the simulator says of other inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from m2flow.engine.plan import StagePlan
from m2flow.plan.explain.flips import FACTORS, flips, rescaled
from m2flow.plan.prediction import Candidate, Decision
from m2flow.plan.profile import Piecewise, StageCost, StageProfile
from m2flow.plan.simulate import simulate
from m2flow.plan.units import Bytes
from tests.plan.explain.cases import GEN, STAGES, TRAIN, plan_of, predicted, profile, span
from tests.plan.small_graphs import TALKING


@pytest.mark.parametrize("what", [GEN, TRAIN, "publishing", "links", "switching"])
def test_rescaling_touches_one_input(what: str) -> None:
    before, after = profile(spread=True), rescaled(profile(spread=True), what, 2.0)
    for name in STAGES:
        times = 2.0 if name == what else 1.0
        old, new = before.stage(name).costs[0], after.stage(name).costs[0]
        assert new.seconds.at(8) == pytest.approx(times * old.seconds.at(8))
        for inner in ("round", "finish"):
            if (curve := getattr(old, inner)) is not None:
                assert getattr(new, inner).at(2) == pytest.approx(times * curve.at(2))
    size = Bytes(1000)
    times = 2.0 if what == "links" else 1.0
    assert after.links["node"].seconds(size) == pytest.approx(
        times * before.links["node"].seconds(size)
    )
    times = 2.0 if what == "publishing" else 1.0
    assert after.publish[0].seconds == times * before.publish[0].seconds


@pytest.fixture(scope="module")
def contest() -> Decision:
    """Generation gains by two lanes, training does not, so it may as well stand beside it.

    In turn on both lanes a step takes g / 2 + t, side by side the larger of g and t.
    """
    flat = profile(generate=1.0)
    cost = StageCost(1, Piecewise(((1.0, 0.2), (64.0, 0.2))))  # of each of two mini-batches
    flat = replace(flat, stages={**flat.stages, TRAIN: StageProfile((cost,))})
    plans = [
        replace(plan, stages={GEN: StagePlan(4), TRAIN: StagePlan()}, max_staleness=1)
        for plan in (plan_of("in turn", [0, 1], [0, 1]), plan_of("beside", [0], [1]))
    ]
    judged = [Candidate(plan, simulate(TALKING, plan, flat, 16)) for plan in plans]
    judged.sort(key=lambda one: one.prediction.seconds)
    return Decision(judged[0], tuple(judged[1:]), flat, 16)


def test_a_flip_flips(contest: Decision) -> None:
    """At its factor the rival is faster by simulation; at the next smaller one it is not."""

    def ahead(factor: float, what: str) -> bool:
        scaled = rescaled(contest.profile, what, factor)
        ours, theirs = (
            simulate(TALKING, one.plan, scaled, 16, steps=2).seconds
            for one in (contest.chosen, contest.others[0])
        )
        return bool(1.01 * theirs < ours)

    found = flips(contest, TALKING)
    assert TRAIN in {flip.input for flip in found}
    for flip in found:
        assert ahead(flip.factor, flip.input)
        smaller = max(f for f in (1.0, *FACTORS) if f < max(flip.factor, 1 / flip.factor))
        assert not ahead(smaller if flip.factor > 1 else 1 / smaller, flip.input)
        assert flip.other_seconds < flip.chosen_seconds
        assert flip.mode == contest.others[0].plan.mode
        assert flip.changes
    changes = [abs(math.log(flip.factor)) for flip in found]
    assert changes == sorted(changes)


def test_a_choice_that_somebody_else_made_has_no_flips() -> None:
    """What was not the best in the first place is not overtaken."""
    slow = Candidate(plan_of("a", [0], [0]), predicted(10, span(0, GEN, 0, 10)))
    fast = Candidate(plan_of("b", [0], [1]), predicted(5, span(0, GEN, 0, 5)))
    assert flips(Decision(slow, (fast,), profile(), 16), TALKING) == []
