"""When a drift lasts, what the profile becomes, and whether another plan repays the pause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.plan.prediction import Candidate, Prediction
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile
from m2flow.plan.units import Items, Seconds
from m2flow.plan.watching import Measured, Watch, pays

PLAN = Plan("auto", (LaneSpec(0),), {"a": Placement(((0,),))})


def candidate(seconds: float, **stages: float) -> Candidate:
    given_stages = {name: Seconds(value) for name, value in stages.items()}
    return Candidate(PLAN, Prediction(Seconds(seconds), Seconds(0.0), {}, {}, given_stages))


def test_a_drift_lasts_when_each_of_the_last_steps_is_off_to_one_side() -> None:
    watch = Watch(candidate(1.0), tolerance=0.15, patience=3, warm_up=0)
    for seconds in (1.3, 1.3, 1.05, 1.3, 1.4):
        watch.note(Measured(seconds, {}))
        assert watch.drift() is None
    watch.note(Measured(1.2, {}))
    assert watch.drift() == pytest.approx(1.3)


def test_a_run_that_got_faster_has_drifted_too() -> None:
    watch = Watch(candidate(1.0), patience=2, warm_up=0)
    watch.note(Measured(0.7, {}))
    watch.note(Measured(0.6, {}))
    assert watch.drift() == pytest.approx(0.65)


def test_steps_off_to_both_sides_are_noise() -> None:
    watch = Watch(candidate(1.0), patience=2, warm_up=0)
    watch.note(Measured(0.5, {}))
    watch.note(Measured(1.5, {}))
    assert watch.drift() is None


def test_the_first_steps_do_not_count() -> None:
    watch = Watch(candidate(1.0), patience=2, warm_up=2)
    for _ in range(3):
        watch.note(Measured(9.0, {}))
    assert watch.drift() is None
    watch.note(Measured(9.0, {}))
    assert watch.drift() == 9.0


def test_the_profile_is_corrected_stage_by_stage() -> None:
    layout = StageCost(
        1,
        Piecewise(((1.0, 0.1), (4.0, 0.3))),
        round=Piecewise(((1.0, 0.01),)),
        finish=Piecewise(((1.0, 0.2),)),
    )
    profile = Profile({name: StageProfile((layout,)) for name in ("a", "b", "unseen")})
    watch = Watch(candidate(1.0, a=0.5, b=0.5), patience=3, warm_up=0)
    for seconds in (0.9, 1.0, 1.1):
        watch.note(Measured(1.5, {"a": seconds, "b": 0.5}))
    corrected = watch.corrected(profile)
    slower = corrected.stage("a").costs[0]
    assert slower.call(Items(4)) == pytest.approx(0.6)
    assert slower.round is not None
    assert slower.round.at(1) == pytest.approx(0.02)
    assert slower.finish_seconds(1) == pytest.approx(0.4)
    assert corrected.stage("b") == profile.stage("b")
    assert corrected.stage("unseen") == profile.stage("unseen")


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 100), st.integers(0, 1000))
def test_a_new_plan_must_repay_its_pause(now: float, then: float, pause: float, steps: int) -> None:
    if pays(Seconds(now), Seconds(then), Seconds(pause), steps):
        assert then * steps + pause < now * steps
        assert then < now
    assert not pays(Seconds(now), Seconds(now), Seconds(0), steps)
    assert not pays(Seconds(now), Seconds(then), Seconds(pause), 0)
