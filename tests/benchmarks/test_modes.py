"""What the comparison of modes says is noise, and what it says of a whole run."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from m2flow.engine.plan import Plan

PLAN = Plan("any", (), {})


def _record(*rounds: list[float]) -> Any:
    record = importlib.import_module("mode_records").Record(PLAN)
    record.measured = list(rounds)
    return record


def test_the_noise_floor_is_the_most_that_the_twins_are_apart() -> None:
    records = importlib.import_module("mode_records")
    twins = {
        "collocated": _record([1.0, 1.0], [1.0, 1.0]),
        "collocated again": _record([1.0, 1.0], [1.1, 1.1]),
    }
    assert records.noise_floor(twins) == pytest.approx(1 - 1 / 1.1)


def test_a_difference_within_the_noise_is_none() -> None:
    records = importlib.import_module("mode_records")
    some = {"a": _record([1.0, 1.0]), "b": _record([1.05, 1.05]), "c": _record([2.0, 2.0])}
    assert records.against(some, "a", ["b", "c"]) == pytest.approx(0.05)
    assert records.verdict(0.05, 0.06) == "as fast"
    assert records.verdict(0.05, 0.04) == "faster"
    assert records.verdict(-0.05, 0.04) == "slower"


def test_trial_steps_count_in_a_whole_run() -> None:
    runs = importlib.import_module("mode_runs")
    started = runs.Started(PLAN, steps=9, seconds=30.0)
    assert started.whole(1.0) == 30.0 + (runs.WHOLE - 9)
