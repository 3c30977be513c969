"""A whole agentic run: figures, rollouts, checkpoints, going on from one, evaluation, report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m2flow.errors import UserError
from m2flow.plan import parse_lanes
from m2flow.plan.file import to_json
from m2flow.workloads.agentic.evaluation import examine
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.common import train
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.reasoning.tasks.jsonl import Jsonl
from m2flow.workloads.reasoning.workers import Learner
from tests.workloads.agentic.conftest import TINY

MakeRecipe = Any
RECIPE: dict[str, Any] = {
    **TINY, "name": "tools", "mode": "eager", "steps": 4, "checkpoint": {"every": 2},
    "warmup": {**TINY["warmup"], "steps": 120},
}  # fmt: skip
RECIPES = Path(__file__).parents[3] / "recipes"
pytestmark = pytest.mark.usefixtures("one_thread")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "model" / "model.safetensors")


def _no_learner(*_: object) -> None:
    raise AssertionError("an examination trains nothing")


def test_four_steps_are_two_a_stop_and_two_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(RECIPE, run_dir=tmp_path / "whole")
    train(RECIPE, {"steps": 2}, run_dir=tmp_path / "parts")
    parts = train(RECIPE, run_dir=tmp_path / "parts", resume=True)
    assert torch.get_num_threads() == 1, "each run begins with as many threads as the one before"
    ours, theirs = weights(whole), weights(parts)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for name in (
        "turns/mean", "tools/calls", "tools/error_share", "tools/cut_share", "tools/failed_share",
        "tools/seconds", "tokens/tools", "eval/accuracy", "eval/turns/mean", "eval/tools/calls",
        "reward/mean", "train/grad_norm",
    ):  # fmt: skip
        assert name in rows[-1], name
    sample = json.loads((whole / "samples.jsonl").read_text().splitlines()[0])
    assert [set(turn) for turn in sample["turns"]] == [{"text", "tools", "result"}] * len(
        sample["turns"]
    )
    joined = "".join(turn["text"] + turn["result"] for turn in sample["turns"])
    assert joined == sample["completion"]
    data = re.search(
        r'id="rollouts">(.*?)</script>', (whole / "report.html").read_text(), re.DOTALL
    )
    assert data is not None
    assert json.loads(data[1])[0]["turns"] == sample["turns"]
    monkeypatch.setattr(Learner, "load", _no_learner)
    begun = whole / "warmup"
    assert begun.is_dir()
    begun.rename(whole / "moved")  # what the run began with is not needed any more
    found = examine(
        Examination(whole / "checkpoints" / "latest", None, limit=8, lanes=parse_lanes("cpu:1"))
    )
    assert found["about"].endswith("held-out problems, with calculator")
    assert found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"]
    assert found["turns/mean"] >= 1


def test_rows_to_train_on_must_stay(tmp_path: Path, tiny_recipe: MakeRecipe) -> None:
    rows = "".join(f'{{"question": "{n}*2=", "answer": "{2 * n}"}}\n' for n in range(12))
    (tmp_path / "rows.jsonl").write_text(rows)
    data = {"task": "jsonl", "path": str(tmp_path / "rows.jsonl"), "options": {}}
    experiment = AgenticExperiment(tiny_recipe(data=data, warmup={"steps": 0}))
    assert isinstance(experiment.task, Jsonl)
    before = replace(experiment.task.rows_read(), digest="another")
    (tmp_path / "data.json").write_text(to_json(before))
    with pytest.raises(UserError, match=r"^data.path: has changed .*\(11 then, 11 now\)"):
        experiment.flow(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["agentic-calculator", "agentic-search"])
def test_a_recipe_learns_to_use_its_tool(name: str, seed: int, tmp_path: Path) -> None:
    """What recipes/README.md promises; without its tool a small model knows next to nothing."""
    run = train(RECIPES / f"{name}.yaml", {"seed": seed, "mode": "eager"}, run_dir=tmp_path / "r")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval/accuracy" in row]
    assert evaluations[0]["eval/accuracy"] < 0.1
    assert evaluations[-1]["eval/accuracy"] > evaluations[0]["eval/accuracy"] + 0.25
    assert evaluations[-1]["eval/accuracy"] > 0.9
    assert evaluations[-1]["eval/tools/calls"] >= 0.99


@pytest.mark.slow
def test_a_recipe_learns_nothing_without_its_tool(tmp_path: Path) -> None:
    """A trajectory that ends with its first turn never sees an answer of the calculator."""
    alone = {"episode.max_turns": 1, "mode": "eager", "steps": 20}
    run = train(RECIPES / "agentic-calculator.yaml", alone, run_dir=tmp_path / "r")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval/accuracy"] < 0.1 for row in rows if "eval/accuracy" in row] == [True] * 2
