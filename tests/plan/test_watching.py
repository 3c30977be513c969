"""When a drift lasts, and whether another plan repays the pause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.plan.units import Seconds
from m2flow.plan.watching import PATIENCE, Watch, pays


def test_a_drift_lasts_when_each_of_the_last_steps_is_off_to_one_side() -> None:
    watch = Watch(Seconds(1.0))
    for seconds in (1.3, 1.3, 1.05, 1.3, 1.4, 1.2, 1.3):
        watch.note(seconds)
        assert watch.drift() is None
    watch.note(1.5)
    assert watch.drift() == pytest.approx(1.3)


def test_a_run_that_got_faster_has_drifted_too() -> None:
    watch = Watch(Seconds(1.0))
    for seconds in (0.7, 0.6, 0.5, 0.6, 0.7):
        watch.note(seconds)
    assert watch.drift() == pytest.approx(0.6)


def test_steps_off_to_both_sides_are_noise() -> None:
    watch = Watch(Seconds(1.0))
    for seconds in (0.5, 1.5, 0.5, 1.5, 0.5):
        watch.note(seconds)
    assert watch.drift() is None


def test_fewer_steps_are_no_drift_however_slow_they_are() -> None:
    watch = Watch(Seconds(1.0))
    for _ in range(PATIENCE - 1):
        watch.note(9.0)
    assert watch.drift() is None
    watch.note(9.0)
    assert watch.drift() == 9.0


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 100), st.integers(0, 1000))
def test_a_new_plan_must_repay_its_pause(now: float, then: float, pause: float, steps: int) -> None:
    if pays(Seconds(now), Seconds(then), Seconds(pause), steps):
        assert then * steps + pause < now * steps
        assert then < now
    assert not pays(Seconds(now), Seconds(now), Seconds(0), steps)
    assert not pays(Seconds(now), Seconds(then), Seconds(pause), 0)
