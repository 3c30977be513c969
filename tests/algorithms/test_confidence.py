"""Intervals against figures of statistics packages, and against what they promise."""

from __future__ import annotations

import random
from statistics import fmean

from m2flow.algorithms.confidence import of_shares, wilson


def test_the_interval_of_a_share() -> None:
    """Wilson's interval at 8 of 10, as statistics packages give it."""
    low, high = wilson(0.8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_single_trials_have_wilson_s_interval() -> None:
    assert of_shares([1.0] * 8 + [0.0] * 2) == wilson(0.8, 10)
    assert of_shares([]) == (0.0, 1.0)


def test_equal_shares_have_an_interval_of_some_width() -> None:
    """Three problems with 7 of 8 right answers each were certain: from 0.875 to 0.875."""
    assert of_shares([7 / 8] * 3) == wilson(7 / 8, 3)
    assert of_shares([0.5]) == wilson(0.5, 1)


def test_answers_to_one_problem_are_no_further_observations() -> None:
    """The interval holds the true mean in about 95 of 100 cases, however many answers there are."""
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        chances = [draw.choice((0.1, 0.9)) for _ in range(60)]
        shares = [fmean(draw.random() < chance for _ in range(16)) for chance in chances]
        low, high = of_shares(shares)
        held += low <= 0.5 <= high
    assert 0.91 <= held / 400 <= 0.98
