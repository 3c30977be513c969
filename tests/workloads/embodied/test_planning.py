"""A step of environments is measured and planned as any other; on a lane its loop runs fused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m2flow.engine.loops import fused_loops
from m2flow.engine.plan import LaneSpec
from m2flow.plan import build_plan, plan_from_json
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.flow import recipe_flow
from tests.cli.conftest import run_command
from tests.runtime.local_cluster import local_cluster

RECIPE = {
    "workload": "embodied",
    "name": "table",
    "lanes": "cpu:2",
    "steps": 2,
    "rollouts_per_step": 4,
    "environment": {"name": "table:red", "options": {"privileged": True, "pixels": 24}},
    "policy": {"hidden": [16]},
    "rollout": {"horizon": 8},
    "update": {"epochs": 1, "minibatches": 1},
    "evaluation": {"episodes": 2, "films": 0},
}


def test_a_recipe_is_measured_and_then_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a simulator takes is in no data sheet: the plan follows from what was measured."""
    monkeypatch.setenv("M2FLOW_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "table.yaml"
    recipe.write_text(json.dumps(RECIPE))
    before = run_command("plan", recipe, "--explain")
    assert before.code == 0
    assert "nothing is known of these lanes yet" in before.err
    refused = run_command("plan", recipe, "--cluster", "1x2xCPU")
    assert refused.code != 0
    assert "m2flow profile RECIPE" in refused.err
    with local_cluster(2):
        done = run_command("profile", recipe, "--budget", 15)
    assert done.code == 0, done.err
    for word in ("simulator.step", "actor.act", "turns: mean 8", "simulator on 1 cpu", "measured"):
        assert word in done.out, word
    planned = run_command("plan", recipe, "--explain")
    assert planned.code == 0, planned.err
    assert "with a profile that is measured" in planned.out
    graph = recipe_flow(read_recipe(RECIPE)).trace()  # type: ignore[arg-type]
    plan = plan_from_json(run_command("plan", recipe, "--json").out)
    assert fused_loops(graph, plan), "a trip between lanes is dearer than any of its turns"


@pytest.mark.parametrize("count", [1, 2])
def test_collocated_loops_are_fused(count: int) -> None:
    graph = recipe_flow(read_recipe(RECIPE)).trace()  # type: ignore[arg-type]
    lanes = [LaneSpec(number) for number in range(count)]
    assert fused_loops(graph, build_plan("collocated", graph, lanes, 4))
