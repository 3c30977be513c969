"""`lane_memory`: a training run whose workers do not fit on their lane together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

M2flow = Callable[..., Any]

THREE = ["algorithm.kl_coefficient=0.1", "steps=2", "evaluation.problems=0", "warmup.steps=10"]
"""Learner, generator and a reference: the first two must be there together to hand weights over."""


def rewards(m2flow: M2flow, recipe: Path, name: str, *words: str) -> list[Any]:
    outcome = m2flow("train", recipe, "--run-dir", name, *THREE, *words)
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    return [[row[key] for key in ("reward/mean", "loss/policy", "samples")] for row in rows[1:]]


def switches(name: str) -> list[str]:
    trace = json.loads(Path(name, "timeline.json").read_text())
    return [event["name"] for event in trace["traceEvents"] if event.get("cat") == "switch"]


def test_workers_that_make_way_learn_the_same(m2flow: M2flow, tiny: Path) -> None:
    """In one process and on a lane; a limit that the two do not keep is refused with its bytes."""
    expected = rewards(m2flow, tiny, "freely", "mode=eager")
    assert not switches("freely")
    for mode in ("eager", "collocated"):
        found = rewards(m2flow, tiny, mode, f"mode={mode}", "lane_memory=210KB")
        assert found == [pytest.approx(row, rel=1e-4) for row in expected]
        moved = switches(mode)
        assert any("reference" in name for name in moved)
        assert any("learner" in name for name in moved)
    refused = m2flow("train", tiny, "--run-dir", "no", *THREE, "mode=eager", "lane_memory=190KB")
    assert "placements.generator" in refused.error
    assert "lane 0 beside learner's, whose weights it takes (got 199840)" in refused.error
    assert "at most 190000 bytes" in refused.error
