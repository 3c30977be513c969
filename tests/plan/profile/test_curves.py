"""Curves through measurements: against slow oracles, and for awkward inputs."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.plan.profile.curves import (
    NEAR,
    Point,
    by_size,
    doubling,
    envelope,
    isotonic,
    least_squares,
    monotone,
    ramps,
    rising,
    typical,
)

SECONDS = st.floats(min_value=1e-6, max_value=1e3)
SAMPLES = st.lists(st.tuples(st.integers(1, 500).map(float), SECONDS), min_size=1, max_size=40)


def isotonic_by_formula(values: list[float], weights: list[float]) -> list[float]:
    """The minimax formula: the largest over starts of the smallest over ends of mean values."""
    count = len(values)

    def mean(a: int, b: int) -> float:
        total = sum(weights[a : b + 1])
        return (
            sum(v * w for v, w in zip(values[a : b + 1], weights[a : b + 1], strict=True)) / total
        )

    return [
        max(min(mean(a, b) for b in range(i, count)) for a in range(i + 1)) for i in range(count)
    ]


@given(st.lists(st.tuples(SECONDS, st.integers(1, 9)), min_size=1, max_size=9))
def test_isotonic_regression_is_that_of_the_formula(rows: list[tuple[float, int]]) -> None:
    values, weights = [v for v, _ in rows], [float(w) for _, w in rows]
    assert isotonic(values, weights) == pytest.approx(isotonic_by_formula(values, weights))


@given(SAMPLES)
def test_curves_rise_and_go_through_the_range_of_what_was_measured(
    samples: list[tuple[float, float]],
) -> None:
    curve = monotone(points(samples))
    seconds = [value for _, value in samples]
    for (x0, y0), (x1, y1) in pairwise(curve.points):
        assert x0 < x1
        assert y0 <= y1
    tolerance = 1 + 1e-9
    for _, y in curve.points:
        assert min(seconds) / tolerance <= y <= max(seconds) * tolerance


def test_one_held_up_call_of_eight_does_not_count() -> None:
    assert typical([1.0] * 7 + [100.0]) == 1.0
    assert typical([1.0, 1.0, 100.0]) == 1.0
    assert typical([3.0]) == 3.0
    assert typical([1.0, 3.0]) == 2.0


def points(samples: list[tuple[float, float]]) -> list[Point]:
    """One point for each group of near sizes."""
    return [
        Point(fmean(x for x, _ in group), typical([y for _, y in group]), 0.0, len(group))
        for group in by_size(samples, lambda sample: sample[0])
    ]


def test_sizes_that_are_near_each_other_are_one_point() -> None:
    assert [point.size for point in points([(100, 1.0), (104, 1.2), (128, 2.0)])] == [102.0, 128.0]
    assert points([(4, 1.0)]) == [Point(4, 1.0, 0.0, 1)]


def test_doubling_ends_at_the_largest() -> None:
    assert doubling(1, 1) == [1]
    assert doubling(1, 24) == [1, 2, 4, 8, 16, 24]
    assert doubling(1, 17) == [1, 2, 4, 8, 17], "no two knots side by side"


@given(st.lists(st.floats(0, 5), min_size=4, max_size=4))
def test_a_rising_curve_is_found_from_its_sums(parts: list[float]) -> None:
    knots = [1, 2, 4, 8]
    curve = rising(knots, parts)
    rows, values = [], []
    for number in range(12):  # sums over different numbers of different sizes
        counted = [(1, number), (2, 3), (3, number % 3), (6, number % 5), (8, 12 - number)]
        rows.append(
            [
                sum(times * row for (_, times), row in zip(counted, column, strict=True))
                for column in zip(*(ramps(knots, x) for x, _ in counted), strict=True)
            ]
        )
        values.append(sum(times * curve.at(x) for x, times in counted))
    found = rising(knots, least_squares(rows, values, [1.0] * len(rows)))
    for x in (1, 2, 3, 5, 8):
        assert found.at(x) == pytest.approx(curve.at(x), rel=1e-2, abs=1e-2)


@given(SAMPLES)
def test_no_measurement_lies_above_the_envelope(samples: list[tuple[float, float]]) -> None:
    curve = envelope(samples)
    assert all(curve.at(size) >= value * (1 - 1e-9) for size, value in samples)
    highest = {x: max(y for size, y in samples if size < NEAR * x) for x, _ in curve.points}
    assert dict(curve.points) == highest
