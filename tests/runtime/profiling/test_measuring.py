"""Which plans a session visits, on steps that do nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow import Batch
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.plan.profile.trials import trial_plans
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.profiling import measuring as session_file
from m2flow.runtime.profiling.measuring import ROUNDS, Session
from tests.plan.small_graphs import GRPO

LANES = (LaneSpec(0), LaneSpec(1))
PLANS = trial_plans(GRPO, LANES, 8)


def visited(monkeypatch: pytest.MonkeyPatch, budget: float) -> list[Plan]:
    """The plans that are launched, one after the other."""
    launches: list[Plan] = []

    @contextmanager
    def launched(_flow: Any, _items: int, plan: Plan, _pool: Any) -> Iterator[Any]:
        launches.append(plan)

        def step(_batch: Batch) -> StepResult:
            return StepResult(0, Batch({}), {}, [], 0.0, 1.0, 1, None)

        yield SimpleNamespace(
            plan=plan,
            graph=GRPO,
            step=step,
            steps=lambda batches: map(step, batches),
            worker_call_everywhere=lambda worker, method: None,
        )

    monkeypatch.setattr(session_file, "run_on", launched)
    pool: Any = SimpleNamespace(lanes=())
    deadline = time.monotonic() + budget
    session = Session(GRPO, pool, lambda: None, [Batch({"x": [0] * 8})], PLANS, deadline)
    said = list(session.run())
    assert len(said) == session.visits == len(launches)
    return launches


def test_plans_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visited(monkeypatch, 1000.0) == ROUNDS * PLANS


def test_the_first_plan_is_measured_though_there_is_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert visited(monkeypatch, -1.0) == PLANS[:1]
