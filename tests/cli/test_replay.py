"""`m2flow plan --replay`: a run directory's steps under its own plan and under another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from m2flow.cli.replay import recorded_run
from m2flow.observe.trace import read_trace
from tests.cli.conftest import M2flow


def test_a_run_is_replayed_under_its_own_plan(m2flow: M2flow, run: Path) -> None:
    outcome = m2flow("plan", "--replay", run, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    recorded, replayed = found["recorded_seconds"], found["replayed_seconds"]
    assert len(found["steps"]) == len(recorded) == len(replayed) > 0
    assert 1 not in found["steps"]  # it warmed the lane up
    for real, again in zip(recorded, replayed, strict=True):
        assert again == pytest.approx(real, rel=0.25)
    assert found["predicted_seconds"] == replayed


def test_a_run_is_replayed_under_a_plan_file(m2flow: M2flow, run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    plan["mode"] = "piecemeal"
    plan["stages"]["verifier.score"] = {"chunk": 1}
    Path("other.json").write_text(json.dumps(plan))
    outcome = m2flow("plan", "--replay", run, "--plan", "other.json")
    assert outcome.code == 0, outcome.err
    assert "under piecemeal" in outcome.out
    assert "median" in outcome.out


def test_the_timeline_keeps_the_engines_steps(run: Path) -> None:
    """People count steps from 1, the engine from 0; a span keeps the engine's number."""
    observed, numbers = recorded_run(run, 4)
    assert len(observed.steps) == len(numbers)
    for step in read_trace(run / "timeline.json").steps:
        calls = [span for span in step.spans if span.kind == "call"]
        assert {span.args["step"] for span in calls} == {step.step - 1}
        assert all("ids" in span.args for span in calls)


def test_a_directory_without_a_run_is_refused(m2flow: M2flow, run: Path) -> None:
    (run / "timeline.json").unlink()
    outcome = m2flow("plan", "--replay", run)
    assert outcome.code == 2
    assert "timeline.json" in outcome.err
    shutil.rmtree(run)
    assert m2flow("plan", "--replay", run).code == 2
