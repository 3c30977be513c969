"""A run in mode `auto`: it starts at once, learns the same, and keeps why its plan was chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.observe.run_directory import RunDirectory
from m2flow.plan.explain import Explanation, explained
from m2flow.plan.file import from_json, read_profile
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile
from m2flow.runtime.driver.pilot import Pilot
from m2flow.workloads.common.launching import write_decision
from tests.plan.small_graphs import TALKING

LANES = tuple(LaneSpec(number, cores=(number,)) for number in range(2))


def profile() -> Profile:
    """Of a flow that trains for long, and generates in about the same time whatever it is given."""
    even = Piecewise(((0.0, 0.0), (1.0, 1.0)))
    generating = StageCost(1, Piecewise(((1.0, 0.9), (16.0, 1.0))), done=even)
    training = StageCost(1, Piecewise(((1.0, 1 / 16), (64.0, 4.0))))
    stages = {"gen.generate": generating, "learner.train": training}
    return Profile({name: StageProfile((layout,)) for name, layout in stages.items()})


def test_a_run_keeps_why_its_plan_was_chosen(tmp_path: Path) -> None:
    directory, pilot = RunDirectory(tmp_path), Pilot(TALKING, LANES, 16, known=profile())
    write_decision(directory, TALKING, pilot, {})
    kept = from_json(Explanation, directory.decision.read_text(), "decision.json")
    assert pilot.decision is not None
    assert kept == explained(pilot.decision, TALKING)
    assert read_profile(directory.profile) == profile()


def test_a_store_that_cannot_be_written_costs_no_run(
    tiny: Path, m2flow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setenv("M2FLOW_CACHE", str(Path("file/cache").absolute()))
    tiny.write_text(tiny.read_text().replace("mode: eager\n", "").replace("cpu:1", "cpu:2"))
    done = m2flow("train", tiny, "steps=6", "evaluation.problems=0", "--run-dir", "run")
    assert done.code == 0, done.err
    assert done.out.count("what the run learns is not stored for later runs: ") == 1


def rows(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def test_a_recipe_that_names_no_mode(tiny: Path, m2flow: Callable[..., Any]) -> None:
    """Its profile is learned on the way; a second run, resumed in the middle, begins with it."""
    few = ["checkpoint.every=3", "checkpoint.keep=1", "evaluation.problems=0"]
    assert m2flow("train", tiny, "steps=8", *few, "--run-dir", "eager").code == 0
    tiny.write_text(tiny.read_text().replace("mode: eager\n", "").replace("cpu:1", "cpu:2"))
    first = m2flow("train", tiny, "steps=8", *few, "--run-dir", "first")
    assert first.code == 0, first.err
    assert "no profile of these lanes is stored: the run begins collocated" in first.out
    expected = [row["reward/mean"] for row in rows("eager")]
    assert [row["reward/mean"] for row in rows("first")] == pytest.approx(expected)
    kept = from_json(Explanation, Path("first/decision.json").read_text(), "decision.json")
    assert any(entrant.measured for entrant in kept.race)
    own = m2flow("plan", tiny, "--profile", "first/profile.json")
    assert own.code == 0, f"the run's own profile is refused: {own.err}"

    half = m2flow("train", tiny, "steps=4", *few, "--run-dir", "second")
    assert "profile: stored at " in half.out
    again = m2flow("train", tiny, "steps=8", *few, "--run-dir", "second", "--resume")
    assert again.code == 0, again.err
    assert [row["reward/mean"] for row in rows("second")] == pytest.approx(expected)
    told = m2flow("plan", tiny, "--explain")
    assert told.code == 0, "the stored profile is the planner's as well"
    assert "tried in real steps:" in told.out, "and the race of the run that it was learned in"
