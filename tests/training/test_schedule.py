"""Learning-rate schedules at the points that matter."""

from __future__ import annotations

import pytest

from m2flow.training.schedule import Schedule


def test_constant_is_one_from_the_first_step() -> None:
    assert [Schedule().factor(step) for step in (0, 1, 10**6)] == [1, 1, 1]


def test_warmup_rises_linearly_and_is_never_zero() -> None:
    schedule = Schedule(warmup_steps=4)
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_to_its_end_and_stays_there() -> None:
    schedule = Schedule("linear", warmup_steps=2, total_steps=12, final_fraction=0.02)
    assert schedule.factor(2) == 1.0
    assert schedule.factor(7) == pytest.approx(0.51)
    assert schedule.factor(12) == schedule.factor(100) == pytest.approx(0.02)


def test_cosine_passes_the_middle_halfway() -> None:
    schedule = Schedule("cosine", total_steps=10)
    assert schedule.factor(5) == pytest.approx(0.5)
    assert schedule.factor(10) == pytest.approx(0.0)


@pytest.mark.parametrize("total_steps", [None, 3])
def test_decay_must_know_its_end(total_steps: int | None) -> None:
    with pytest.raises(AssertionError, match="total_steps"):
        Schedule("linear", warmup_steps=3, total_steps=total_steps)


def test_idle_steps_move_nothing_whatever_comes_after() -> None:
    """While a critic alone learns, the policy stands still; what is left is a run of its own."""
    for decay in ("constant", "linear", "cosine"):
        schedule = Schedule(decay, 4, total_steps=12, final_fraction=0.1, idle_steps=3)
        rest = Schedule(decay, 4, total_steps=9, final_fraction=0.1)
        assert [schedule.factor(step) for step in range(3)] == [0.0] * 3
        assert [schedule.factor(step) for step in range(3, 14)] == [
            rest.factor(step) for step in range(11)
        ]
    assert Schedule(warmup_steps=10, idle_steps=40).factor(40) == 0.1


def test_a_policy_behind_idle_steps_reaches_its_learning_rate() -> None:
    """The decay had gone on beside them, and took half of the rate of a run with half idle."""
    schedule = Schedule("cosine", warmup_steps=10, total_steps=100, idle_steps=50)
    assert max(map(schedule.factor, range(100))) == 1.0
    assert schedule.factor(80) == pytest.approx(0.5)
    assert schedule.factor(100) == 0.0


def test_decay_must_know_an_end_behind_idle_steps() -> None:
    with pytest.raises(AssertionError, match="total_steps"):
        Schedule("linear", warmup_steps=3, total_steps=6, idle_steps=3)
