"""Charts: round ticks that enclose the data, gaps, thinning, smoothing without lag."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.observe.charts import MAX_POINTS, Series, line_chart, round_ticks, smooth, thin
from m2flow.observe.formatting import clock, number, percent, seconds

finite = st.floats(-1e9, 1e9, allow_nan=False)


@given(low=finite, high=finite, count=st.integers(2, 8))
def test_ticks_enclose_the_values(low: float, high: float, count: int) -> None:
    low, high = min(low, high), max(low, high)
    if high - low < 1e-9 * max(abs(low), abs(high)):
        high = low
    ticks = round_ticks(low, high, count)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack
    assert high - slack <= ticks[-1]
    assert 2 <= len(ticks) <= count + 3


@given(low=st.integers(0, 10**6), length=st.integers(0, 10**6))
def test_step_ticks_are_whole_and_inside(low: int, length: int) -> None:
    ticks = round_ticks(low, low + length, 5, whole=True)
    assert all(tick == int(tick) for tick in ticks)
    assert 1 <= len(ticks) <= 12
    assert low <= ticks[0] <= ticks[-1] <= low + max(1, length)


@given(values=st.lists(finite, min_size=1, max_size=60), reach=st.integers(1, 12))
def test_smoothing_keeps_a_straight_line(values: list[float], reach: int) -> None:
    assert len(smooth(values, reach)) == len(values)
    line = [3.0 - 0.5 * index for index in range(len(values))]
    assert smooth(line, reach) == pytest.approx(line)


def test_thinning_keeps_means_and_the_last_step() -> None:
    points = [(float(step), float(step % 2)) for step in range(1, 10_001)]
    thinned = thin(points)
    assert len(thinned) <= MAX_POINTS
    assert thinned[-1][0] == 10_000
    assert {round(y, 1) for _, y in thinned} == {0.5}


def test_a_value_that_is_missing_leaves_a_gap() -> None:
    series = Series("loss", [(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, 1.0)])
    svg = line_chart([series], label="Loss")
    assert svg.count('class="curve"') == 2
    ET.fromstring(svg)


@pytest.mark.parametrize("points", [[(0, 0.0)], [(5, -3.0), (6, -3.0)], [(1, 1e-12), (2, 1e12)]])
def test_odd_ranges_are_drawn(points: list[tuple[float, float | None]]) -> None:
    svg = line_chart([Series("<x>", points)], label="a & b")
    ET.fromstring(svg)
    assert "nan" not in svg


def test_a_long_run_makes_a_small_chart() -> None:
    points: list[tuple[float, float | None]] = [(step, step**0.5) for step in range(100_000)]
    assert len(line_chart([Series("x", points)], label="x")) < 60_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.47, "0.47"),
        (0.12345, "0.123"),
        (1.0, "1"),
        (-12.345, "-12.3"),
        (999.96, "1000"),
        (1234.0, "1,234"),
        (5000.0, "5k"),
        (28_123.0, "28.1k"),
        (4.56e6, "4.56M"),
        (1e-5, "1e-05"),
        (float("nan"), "–"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_durations_and_shares_read_naturally() -> None:
    values = [0.0, 2e-5, 0.0123, 4.56, 192.0, 7500.0]
    written = ["0 s", "20 µs", "12.3 ms", "4.56 s", "3 min 12 s", "2 h 05 min"]
    assert [seconds(value) for value in values] == written
    assert [clock(value) for value in (7, 754, 3723)] == ["0:07", "12:34", "1:02:03"]
    assert [percent(share) for share in (0.0, 0.004, 0.5, 1.0)] == ["0 %", "0.4 %", "50 %", "100 %"]


def test_a_long_run_has_a_band_from_the_least_to_the_largest_value() -> None:
    values = [(float(step), float(step % 2)) for step in range(1000)]
    drawn = line_chart([Series("a", values)], label="a")
    (band,) = re.findall(r'class="band"[^>]* d="M([^"]*)Z"', drawn)
    heights = {point.split()[1] for point in band.split("L")}
    assert len(heights) == 2, "the means lie between 0 and 1, the band reaches both"
    assert 'class="band"' not in line_chart([Series("a", values[:100])], label="a")
