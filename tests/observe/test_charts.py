"""Charts: round ticks that enclose the data, what is drawn of a curve, how numbers are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.observe.charts import ChartLine, line_chart, round_ticks
from m2flow.observe.curve_data import TREND_FROM, curves_of
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


def line(values: Mapping[int, float | None], name: str = "x") -> tuple[list[int], ChartLine]:
    """A curve of at most 200 values over its axis, as the report draws it."""
    told = curves_of([{step: {"a": value} for step, value in values.items()}], 200)
    return told["x"], ChartLine(name, told["charts"][0]["curves"][0], "red")


@pytest.mark.parametrize("values", [{0: 0.0}, {5: -3.0, 6: -3.0}, {1: 1e-12, 2: 1e12}])
def test_odd_ranges_are_drawn(values: dict[int, float | None]) -> None:
    x, drawn = line(values, "<x>")
    svg = line_chart(x, [drawn], label="a & b")
    ET.fromstring(svg)
    assert "nan" not in svg


def test_a_step_without_a_value_is_passed_over() -> None:
    x, drawn = line({1: 1.0, 2: 2.0, 3: None, 4: 3.0})
    svg = line_chart(x, [drawn], label="Loss")
    (path,) = re.findall(r'class="curve"[^>]* d="M([^"]*)"', svg)
    assert path.count("L") == svg.count("<circle") - 1 == 2


def test_a_lone_value_is_a_dot() -> None:
    x, drawn = line({1: 1.0})
    assert line_chart(x, [replace(drawn, dashed=True)], label="a").count("<circle") == 1
    x, drawn = line({1: 1.0, 2: 2.0})
    assert line_chart(x, [replace(drawn, dashed=True)], label="a").count("<circle") == 0


def test_a_long_run_makes_a_small_chart() -> None:
    x, drawn = line({step: step**0.5 for step in range(100_000)})
    assert len(line_chart(x, [drawn], label="x")) < 20_000


def test_values_trend_and_spread_are_drawn() -> None:
    x, drawn = line({step: float(step % 2) for step in range(1000)})
    svg = line_chart(x, [drawn], label="a")
    assert re.findall(r'<path class="([^"]*)"', svg) == ["band", "curve raw", "curve"]
    x, drawn = line({step: float(step % 2) for step in range(TREND_FROM - 1)})
    svg = line_chart(x, [drawn], label="a")
    assert re.findall(r'<path class="([^"]*)"', svg) == ["curve"]


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
