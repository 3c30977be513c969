"""A dead tool, a hanging tool and an oversized answer cost one trajectory, and the run goes on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from m2flow.runtime.driver.launch import launch
from m2flow.workloads.agentic.dialect import CUT
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.reasoning.workers import ModelSource

MakeRecipe = Any
pytestmark = pytest.mark.usefixtures("one_thread")
SERVER = Path(__file__).parents[2] / "tools" / "mcp_server.py"


def shaky(formula: str) -> str:
    """Compute a formula; by its last digit raise, hang, or say too much."""
    from m2flow.tools.calculator import calculate

    match formula.strip()[-1:]:
        case "7":
            raise OSError("no disk")
        case "8":
            time.sleep(20)
        case "9":
            return "9" * 10_000_000
    return calculate(formula)


def tool_of(kind: str) -> dict[str, Any]:
    if kind == "function":
        return {"tool": f"{__name__}:shaky"}
    pytest.importorskip("mcp", reason="needs the extra mcp")
    return {
        "tool": "mcp",
        "options": {
            "command": [sys.executable, str(SERVER)],
            "env": {"PYTHONPATH": os.pathsep.join(sys.path)},
            "only": ["shaky"],
        },
    }


@pytest.mark.parametrize("kind", ["function", "mcp"])
def test_what_a_tool_does_wrong_costs_its_trajectory(
    kind: str, tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    recipe = tiny_recipe(
        tools=[tool_of(kind)],
        prompts_per_step=12,
        samples_per_prompt=4,
        minibatches=1,
        episode={"tool_deadline_seconds": 1.0, "max_result_tokens": 20, "tool_concurrency": 4},
    )
    experiment = AgenticExperiment(recipe, warmed)
    with launch(experiment.flow(), items_per_step=12, mode="eager") as run:
        results = [run.step(experiment.batch(step)) for step in range(2)]
    failed = finished = cut = 0
    for result in results:
        output, figures = result.output, experiment.metrics(result)
        assert len(output) == 48
        for reason, failure, turns in zip(
            output["finish_reason"], output["failure"], output["turns"], strict=True
        ):
            assert (reason == "tool") == bool(failure)
            asked = [turn["text"].rstrip("]")[-1:] for turn in turns if turn["text"].endswith("]")]
            if failure:
                failed += 1
                assert failure.startswith("tool shaky: "), failure
                assert asked[-1] in ("7", "8")
            finished += reason == "stop"
            cut += any(CUT in turn["result"] for turn in turns)
        assert figures["tools/failed_share"] == sum(map(bool, output["failure"])) / 48
        assert figures["train/grad_norm"] >= 0
        assert all("shaky" in alarm for alarm in experiment.alarms(result) if "tool" in alarm)
    assert failed >= 2
    assert cut >= 1
    assert finished >= 20
    assert failed < 48
