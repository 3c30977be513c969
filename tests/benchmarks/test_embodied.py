"""Workloads of environments are what they say, and the plans in groups are valid ones."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from m2flow.engine.loops import fused_loops
from m2flow.plan import build_plan, validate
from m2flow.plan.lanes import LaneSpec

LANES = (LaneSpec(0), LaneSpec(1))


@pytest.fixture(scope="module")
def workloads(_benchmarks: None) -> Any:
    return importlib.import_module("workloads.embodied")


def test_labour_goes_on_where_it_was_saved(workloads: Any) -> None:
    labour = importlib.import_module("labour").Labour
    one, other = labour(rounds=2), labour(rounds=2)
    one.reset(3, None)
    other.reset(4, None)
    action = np.ones(2, np.float32)
    one.step(action)
    other.restore(one.state())
    assert one.step(action) == other.step(action)
    assert np.array_equal(one.observe()["state"], other.observe()["state"])


@pytest.mark.parametrize("name", ["fast", "slow", "balanced", "one_sided"])
def test_every_mode_has_a_plan(workloads: Any, name: str) -> None:
    workload = getattr(workloads, name)()
    graph = workload.make_flow().trace()
    for mode in ("collocated", "disaggregated", "hybrid"):
        validate(build_plan(mode, graph, LANES, workload.items), graph, workload.items)
    assert len(workload.batch(0)) == workload.items


@pytest.mark.parametrize("count", [1, 2, 4])
def test_groups_take_turns_on_two_lanes(workloads: Any, count: int) -> None:
    workload = workloads.balanced()
    graph = workload.make_flow().trace()
    plan = importlib.import_module("embodied").in_groups(workload, count)
    validate(plan, graph, workload.items)
    assert not fused_loops(graph, plan)
    assert plan.stages["actor.act"].chunk == workload.items // count
    assert plan.placements["actor"].lanes != plan.placements["simulator"].lanes
