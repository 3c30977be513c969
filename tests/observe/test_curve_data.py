"""Curves: few values however long the run, a trend without lag, a band that holds what it says."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.observe.curve_data import NEIGHBOURS, TREND_FROM, Curve, curves_of


def curve(values: list[float], points: int = 200) -> Curve:
    told = curves_of([{step: {"a": value} for step, value in enumerate(values)}], points)
    return told["charts"][0]["curves"][0]


def test_curves_of_long_runs_are_means() -> None:
    rows = {step: {"step": step, "a": float(step % 2), "bad": None} for step in range(1, 1001)}
    rows[500]["seldom"] = 7.0
    told = curves_of([rows, {3: {"a": 9.0}}], points=10)
    assert told["x"] == [100 * n for n in range(1, 11)]
    charts = {chart["key"]: chart["curves"] for chart in told["charts"]}
    assert charts.keys() == {"a", "seldom"}
    first, second = charts["a"]
    assert first["mean"] == [0.5] * 10
    assert second["mean"] == [9.0, *[None] * 9]
    assert charts["seldom"][0]["mean"][4] == 7.0
    near = curves_of([rows], points=10, low=11, high=14)
    assert near["x"] == [11, 12, 13, 14]
    assert near["charts"][0]["curves"][0]["mean"] == [1.0, 0.0, 1.0, 0.0]
    assert (near["first"], near["last"]) == (1, 1000)
    assert curves_of([{}], points=10)["charts"] == []


def test_few_values_have_neither_trend_nor_band() -> None:
    few = curve([float(n) for n in range(TREND_FROM - 1)])
    assert (few["trend"], few["low"], few["high"]) == ([], [], [])


@given(
    start=st.floats(-1e3, 1e3),
    slope=st.floats(-10, 10),
    count=st.integers(TREND_FROM, 500),
    points=st.integers(30, 300),
)
def test_the_trend_of_a_straight_line_is_the_line(
    start: float, slope: float, count: int, points: int
) -> None:
    found = curve([start + slope * n for n in range(count)], points)
    for trend, mean in zip(found["trend"], found["mean"], strict=True):
        # the last place may hold fewer steps than the others, and then its mean weighs less
        assert trend == pytest.approx(mean, abs=1e-3 + abs(slope) * count / points)


def test_the_band_reaches_from_the_tenth_to_the_ninetieth_percentile() -> None:
    """Against a slow oracle: all values of the neighbours, sorted."""
    draw = random.Random(5)
    values = [draw.gauss(0.0, 1.0) for _ in range(600)]
    found = curve(values, points=600)
    reach = 600 // NEIGHBOURS
    for place in range(reach, 600 - reach):
        near = sorted(values[place - reach : place + reach + 1])
        assert found["trend"][place] == pytest.approx(fmean(near), abs=1e-5)
        assert found["low"][place] == pytest.approx(near[round(0.1 * (len(near) - 1))], abs=1e-5)
        assert found["high"][place] == pytest.approx(near[round(0.9 * (len(near) - 1))], abs=1e-5)


def test_the_band_of_a_long_run_holds_most_of_its_values() -> None:
    draw = random.Random(6)
    values = [n / 20_000 + draw.gauss(0.0, 0.1) for n in range(20_000)]
    found = curve(values, points=200)
    inside = 0
    for place, (low, high) in enumerate(zip(found["low"], found["high"], strict=True)):
        assert low is not None
        assert high is not None
        inside += sum(low <= value <= high for value in values[100 * place : 100 * place + 100])
    assert 0.7 < inside / len(values) < 0.9


def test_a_figure_of_few_steps_keeps_its_places() -> None:
    rows = {step: {"a": float(step)} if step % 10 == 0 else {} for step in range(400)}
    found = curves_of([rows], points=400)["charts"][0]["curves"][0]
    for values in (found["mean"], found["trend"], found["low"], found["high"]):
        assert [place for place, value in enumerate(values) if value is not None] == [
            *range(0, 400, 10)
        ]
    known = [value for value in found["trend"] if value is not None]
    assert all(before < after for before, after in pairwise(known))
