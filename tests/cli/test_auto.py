"""What a run in mode `auto` keeps of its choice."""

from __future__ import annotations

from pathlib import Path

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
    write_decision(directory, TALKING, pilot)
    kept = from_json(Explanation, directory.decision.read_text(), "decision.json")
    assert pilot.decision is not None
    assert kept == explained(pilot.decision, TALKING)
    assert read_profile(directory.profile) == profile()
