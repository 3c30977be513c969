"""Lanes, memory and gangs from a recipe to its plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.plan import plan_from_json

M2flow = Callable[..., Any]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.plan.lanes.available_cores", lambda: (0, 1))


def test_the_plan_has_what_the_recipe_asks_for(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow(
        "plan", tiny, "--json", "--mode", "collocated",
        "lanes=2xcpu:2", "lane_memory=1.5MiB", "training.gang=2", "generation.gang=4",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    plan = plan_from_json(outcome.out)
    assert [lane.node for lane in plan.lanes] == [0, 0, 1, 1]
    assert {lane.memory_bytes for lane in plan.lanes} == {3 * 2**19}
    assert plan.placements["learner"].replicas == ((0, 1), (2, 3))
    assert plan.placements["generator"].replicas == ((0, 1, 2, 3),)
    assert plan.placements["verifier"].replicas == ((0,), (1,), (2,), (3,))


def test_a_size_without_a_unit_counts_bytes(tiny: Path, m2flow: M2flow) -> None:
    plan = plan_from_json(m2flow("plan", tiny, "--json", "lane_memory=4096").out)
    assert plan.lanes[0].memory_bytes == 4096


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["lane_memory=20 parsecs"],
            (
                "lane_memory: is not a size (got '20 parsecs'); expected a number and one of B, "
                "KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as 200MB"
            ),
        ),
        (
            ["--mode", "collocated", "lanes=cpu:2", "training.gang=3"],
            (
                "training.gang: the worker's 2 lanes cannot be cut into gangs of the same size "
                "(got 3); expected a divisor of 2"
            ),
        ),
        (
            ["--mode", "hybrid", "lanes=cpu:1"],
            "mode: hybrid needs two lanes (got '1 lanes'); use --mode collocated",
        ),
        (
            ["--mode", "hybird"],
            (
                "mode: is wrong (got 'hybird'); expected 'auto', 'eager', 'collocated', "
                "'disaggregated' or 'hybrid'; did you mean 'hybrid'?"
            ),
        ),
        (
            ["--mode", "collocated", "lanes=cpu:2", "generation.gang=4"],
            (
                "generation.gang: the worker's 2 lanes cannot be cut into gangs of the same size "
                "(got 4); expected a divisor of 2"
            ),
        ),
        (["training.gang=0"], "training.gang: is wrong (got 0); expected at least 1"),
    ],
)
def test_refusals(tiny: Path, m2flow: M2flow, words: list[str], error: str) -> None:
    assert m2flow("plan", tiny, *words).error == error
