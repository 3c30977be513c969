"""Which plans a session visits, on steps whose seconds are made up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow import Batch
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.plan.measured import trial_plans
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.profiling import session as session_file
from m2flow.runtime.profiling.session import ROUNDS, TOO_SLOW, Session
from tests.plan.small_graphs import GRPO

LANES = (LaneSpec(0), LaneSpec(1))
PLANS = trial_plans(GRPO, LANES, 8, fits_gang=lambda worker, size: worker == "learner")


def has_gangs(plan: Plan) -> bool:
    return any(len(gang) > 1 for spot in plan.placements.values() for gang in spot.replicas)


def visited(monkeypatch: pytest.MonkeyPatch, gang_seconds: float) -> list[int]:
    """How often each plan is, where a step takes 1 s and on gangs so many."""

    @contextmanager
    def launched(_flow: Any, *, plan: Plan, **_: Any) -> Iterator[Any]:
        seconds = gang_seconds if has_gangs(plan) else 1.0

        def step(_batch: Batch) -> StepResult:
            return StepResult(0, Batch({}), {}, [], 0.0, seconds, 1, None)

        yield SimpleNamespace(
            plan=plan,
            graph=GRPO,
            step=step,
            steps=lambda batches: map(step, batches),
            worker_call_everywhere=lambda worker, method: None,
        )

    monkeypatch.setattr(session_file, "launch", launched)
    pool: Any = SimpleNamespace(lanes=())
    session = Session(
        GRPO, pool, lambda: None, [Batch({"x": [0] * 8})], PLANS, time.monotonic() + 1000
    )
    counts = [0] * len(PLANS)
    while (number := session.next()) is not None and max(counts) < ROUNDS + 2:
        session.visit(number)
        counts[number] += 1
    assert session.complete
    return counts


def test_slow_gangs_are_tried_once_and_quick_ones_as_often_as_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gangs = [has_gangs(plan) for plan in PLANS]
    assert sum(gangs) == 2, "calls of two sizes"
    slow = visited(monkeypatch, 2 * TOO_SLOW)
    quick = visited(monkeypatch, 1.0)
    assert [times for gang, times in zip(gangs, slow, strict=True) if gang] == [1, 0]
    assert all(times >= ROUNDS for gang, times in zip(gangs, slow, strict=True) if not gang)
    assert all(times >= ROUNDS for times in quick)
