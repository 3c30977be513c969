"""Lengths of answers: against draws, and what no distribution can be."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.models.lengths import (
    WIDEST,
    Answers,
    LogNormalLengths,
    fit_lengths,
    lengths_below,
)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(500, 40_000), st.floats(0.05, 0.95), st.floats(0.001, 0.04))
def test_fitted_lengths_have_the_mean_and_the_tail(maximum: int, part: float, tail: float) -> None:
    lengths = fit_lengths(part * maximum, maximum, tail)
    assert lengths.mean == pytest.approx(part * maximum, rel=1e-6)
    drawn = lengths.sample(4000, seed=1)
    assert sum(drawn) / 4000 == pytest.approx(lengths.mean, rel=0.02)
    assert sum(length >= maximum * (1 - 1e-9) for length in drawn) / 4000 == pytest.approx(
        tail, abs=1 / 4000
    )
    assert max(drawn) <= maximum


def test_the_mean_in_closed_form_is_that_of_many_draws() -> None:
    lengths = LogNormalLengths(math.log(1000), 1.0, 3000)
    random_ = random.Random(0)
    drawn = [min(random_.lognormvariate(math.log(1000), 1.0), 3000) for _ in range(100_000)]
    assert lengths.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
    assert lengths.cut(2000).mean < lengths.mean


@pytest.mark.parametrize("mean", [0, 1, 20_000, 30_000])
def test_no_lengths_of_an_impossible_mean(mean: float) -> None:
    with pytest.raises(UserError, match=r"lengths\.mean"):
        fit_lengths(mean, 20_000)


@pytest.mark.parametrize("mean", [0, 20_000, 30_000, math.nan])
def test_no_lengths_of_a_mean_that_is_not_below_the_maximum(mean: float) -> None:
    with pytest.raises(UserError, match=r"lengths\.mean.*expected more than 0 and less than 20000"):
        lengths_below(mean, 20_000)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(500, 40_000), st.floats(1e-5, 0.95))
def test_fewer_answers_reach_the_maximum_where_the_mean_is_low(maximum: int, part: float) -> None:
    """The spread stays in bounds, and where it is within them nothing else is assumed."""
    lengths = lengths_below(part * maximum, maximum)
    assert lengths.mean == pytest.approx(part * maximum, rel=1e-6)
    assert lengths.spread <= WIDEST + 1e-9
    if lengths.spread < WIDEST:
        assert lengths == fit_lengths(part * maximum, maximum)
    assert lengths.above(maximum) <= 0.02 + 1e-9
    drawn = lengths.stratified(4000)
    assert sum(length > maximum / 2 for length in drawn) / 4000 == pytest.approx(
        lengths.above(maximum / 2), abs=1 / 4000
    )


def test_tokens_attended_to_are_those_of_long_answers() -> None:
    even = Answers(100, fit_lengths(999.9, 1000))
    assert even.context == pytest.approx(even.tokens / 2, rel=0.01)
    uneven = Answers(100, fit_lengths(300, 1000))
    assert uneven.context > 0.6 * uneven.tokens
