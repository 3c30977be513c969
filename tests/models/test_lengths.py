"""Lengths of answers: against draws, and what no distribution can be."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.models.lengths import Answers, LogNormalLengths, fit_lengths


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


def test_tokens_attended_to_are_those_of_long_answers() -> None:
    even = Answers(100, fit_lengths(999.9, 1000))
    assert even.context == pytest.approx(even.tokens / 2, rel=0.01)
    uneven = Answers(100, fit_lengths(300, 1000))
    assert uneven.context > 0.6 * uneven.tokens
