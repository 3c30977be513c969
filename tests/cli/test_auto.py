"""What a run in mode `auto` keeps of its choice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from m2flow.cli.auto import QUICK_SECONDS, write_decision
from m2flow.engine.plan import LaneSpec
from m2flow.observe.run_directory import RunDirectory
from m2flow.plan.decide import decide
from m2flow.plan.prediction import Decision
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile
from m2flow.plan.profile_files import read_profile
from tests.plan.small_graphs import TALKING

LANES = tuple(LaneSpec(number, cores=(number,)) for number in range(2))


def decision() -> Decision:
    """Of a flow that trains for long, and generates in about the same time whatever it is given."""
    even = Piecewise(((0.0, 0.0), (1.0, 1.0)))
    generating = StageCost(1, Piecewise(((1.0, 0.9), (16.0, 1.0))), done=even)
    training = StageCost(1, Piecewise(((1.0, 1 / 16), (64.0, 4.0))))
    stages = {"gen.generate": generating, "learner.train": training}
    profile = Profile({name: StageProfile((layout,)) for name, layout in stages.items()})
    return decide(TALKING, profile, LANES, 16)


def test_a_quick_choice_is_kept_with_what_would_change_it(tmp_path: Path) -> None:
    directory, found = RunDirectory(tmp_path), decision()
    write_decision(directory, TALKING, replace(found, seconds_to_decide=0.1))
    kept = json.loads(directory.decision.read_text())
    assert "gen.generate" in {flip["input"] for flip in kept["flips"]}
    assert {flip["how"] for flip in kept["flips"]} <= {"estimated", "searched"}
    assert read_profile(directory.profile) == found.profile
    write_decision(directory, TALKING, replace(found, seconds_to_decide=2 * QUICK_SECONDS))
    assert json.loads(directory.decision.read_text())["flips"] is None
