"""Why a plan was chosen: what bounds it, how others differ, as words and as a file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from m2flow.engine.plan import StagePlan
from m2flow.plan import read_plan
from m2flow.plan.choose import choose
from m2flow.plan.explain import Explanation, explained
from m2flow.plan.explain.bottleneck import bottleneck
from m2flow.plan.explain.differences import differences, title
from m2flow.plan.explain.flips import flips
from m2flow.plan.explain.words import in_words, summary
from m2flow.plan.file import from_json, to_json
from m2flow.plan.prediction import Candidate, Decision
from m2flow.plan.race import Entrant, tried
from m2flow.plan.units import Bytes, Seconds
from tests.plan.explain.cases import GEN, TRAIN, lanes, plan_of, predicted, profile, span
from tests.plan.small_graphs import TALKING


@pytest.fixture(scope="module")
def decision() -> Decision:
    return choose(TALKING, profile(), lanes(2), 16)


@pytest.fixture(scope="module")
def why(decision: Decision) -> Explanation:
    decision = replace(decision, profile=replace(decision.profile, assumptions=("nothing",)))
    return explained(decision, TALKING, flips=flips(decision, TALKING))


# --- the bottleneck -------------------------------------------------------------------------------


def test_the_bottleneck_is_what_fills_the_busiest_lanes() -> None:
    spans = [span(0, GEN, 0, 9), span(1, GEN, 0, 2), span(1, TRAIN, 9, 10)]
    plan = plan_of("collocated", [0, 1], [0, 1])
    found = bottleneck(Candidate(plan, predicted(10, *spans)))
    assert (found.what, found.lanes, found.seconds, found.share) == (GEN, (0,), 9, 0.9)
    assert "the last 7 s of it run on at most half of its lanes" in found.why


def test_the_bottleneck_is_told_of_a_step_where_several_are_shown() -> None:
    spans = [span(0, GEN, 0, 9), span(0, GEN, 10, 19)]
    prediction = replace(predicted(20, *spans), seconds=Seconds(10))
    found = bottleneck(Candidate(plan_of("ahead", [0], [0]), prediction))
    assert (found.what, found.seconds, found.share) == (GEN, 9, 0.9)


def test_lanes_that_mostly_wait_are_bound_by_waiting() -> None:
    spans = [span(0, GEN, 0, 2), span(1, TRAIN, 7, 10)]
    found = bottleneck(Candidate(plan_of("beside", [0], [1]), predicted(10, *spans)))
    assert (found.what, found.lanes, found.seconds) == ("waiting", (1,), 7)


def test_the_tail_of_a_stage_is_told() -> None:
    spans = [span(0, GEN, 0, 9), *(span(lane, GEN, 0, 2) for lane in (1, 2, 3))]
    plan = plan_of("collocated", range(4), [0], 4)
    found = bottleneck(Candidate(plan, predicted(9, *spans, count=4)))
    assert "the last 7 s of it run on at most half of its lanes" in found.why


# --- differences ----------------------------------------------------------------------------------


def test_differences_in_words() -> None:
    plan = plan_of("collocated", [0, 1], [0, 1])
    other = replace(
        plan_of("auto", [0], [1]),
        stages={GEN: StagePlan(4, max_running=8), TRAIN: StagePlan(16)},
        order=(TRAIN, GEN),
        max_staleness=1,
    )
    assert differences(plan, plan) == []
    assert differences(plan, other) == [
        "gen on lane 0 instead of lanes 0-1",
        "learner on lane 1 instead of lanes 0-1",
        "gen.generate in calls of 4 instead of 8",
        "at most 8 running in gen.generate instead of any",
        "a lane prefers learner.train",
        "staleness 1 instead of 0",
    ]
    assert title(other) == "auto, staleness 1"


def test_layouts_are_named_in_differences() -> None:
    plan = plan_of("collocated", [0, 1], [0, 1])
    gang = replace(plan.placements["learner"], replicas=((0, 1),), layout="fsdp2")
    other = replace(plan, placements={**plan.placements, "learner": gang})
    (phrase,) = differences(plan, other)
    assert phrase == "learner on lanes 0-1 in gangs of 2 as fsdp2 instead of lanes 0-1"


# --- the whole ------------------------------------------------------------------------------------


def test_the_words_say_everything(why: Explanation) -> None:
    told = "\n".join(in_words(why))
    assert told.isascii()
    for part in (
        "plan: ", "items/s", "bottleneck: ", "idle: ", "runner-up: ", "compute", "switching",
        "publishing", "links", "waiting", "what would change the choice:",
        "G gen.generate", "assumed, as nothing was measured:\n  nothing\n\n",
    ):  # fmt: skip
        assert part in told, part
    assert told.startswith("\n".join(summary(why)))


def test_the_words_set_memory_at_its_peak() -> None:
    limited = (*lanes(1), replace(lanes(2)[1], memory_bytes=2000))
    held = replace(predicted(5, span(0, GEN, 0, 5)), peak_bytes={0: Bytes(100), 1: Bytes(1234)})
    chosen = Candidate(replace(plan_of("a", [0, 1], [1]), lanes=limited), held)
    told = summary(explained(Decision(chosen, (), profile(), 16), TALKING))
    assert "memory: at most 1.23 KB of 2 KB on a lane" in told


def test_the_picture_of_steps_that_overlap_says_how_many_it_shows(decision: Decision) -> None:
    ahead = replace(predicted(20, span(0, GEN, 0, 20)), seconds=Seconds(10), staleness=0.5)
    chosen = Candidate(replace(plan_of("a", [0, 1], [1]), max_staleness=1), ahead)
    told = in_words(explained(Decision(chosen, (), profile(), 16), TALKING))
    assert told[told.index("2 steps, which overlap:") + 1].startswith("lane 0 ")
    assert not any("overlap" in line for line in in_words(explained(decision, TALKING)))


def test_the_race_is_told_plan_by_plan(decision: Decision) -> None:
    plan = decision.chosen.plan
    race = tried(
        [
            Entrant("collocated", plan, 0.5, 0.0, [0.52, 0.54, 0.53]),
            Entrant("hybrid", plan, 0.6, verdict="out of memory on lane 1"),
        ]
    )
    later = replace(decision, profile=replace(decision.profile, race=race))
    for why in (explained(decision, TALKING, race=race), explained(later, TALKING)):
        told = summary(why)
        start = told.index("tried in real steps:")
        assert told[start + 1 : start + 3] == [
            "  collocated: 530 ms a step in 3 steps, 500 ms predicted; racing",
            "  hybrid: no step, 600 ms predicted; out of memory on lane 1",
        ]
    assert "tried in real steps:" not in summary(explained(later, TALKING, race=()))


def test_what_was_ruled_out_is_told(decision: Decision) -> None:
    found = replace(decision, ruled_out={"disaggregated": "learner does not fit on lane 1"})
    told = in_words(explained(found, TALKING))
    assert told[told.index("ruled out:") + 1] == "  disaggregated: learner does not fit on lane 1"


def test_an_explanation_beside_its_plan_is_a_plan_file(
    why: Explanation, decision: Decision, tmp_path: Path
) -> None:
    plan, file = decision.chosen.plan, tmp_path / "plan.json"
    text = to_json({**dataclasses.asdict(plan), "decision": why})
    file.write_text(text)
    assert read_plan(file) == plan
    kept = json.dumps(json.loads(text)["decision"])
    assert from_json(Explanation, kept, "decision") == why


def test_the_figures_add_up(why: Explanation) -> None:
    whole = why.seconds * why.num_lanes
    assert sum(why.predicted.terms.values()) == pytest.approx(whole, rel=0.02)
    assert why.runners_up[0].seconds >= 0.99 * why.seconds
    assert sorted(lane for row in why.timeline.rows for lane in row.lanes) == [0, 1]


def test_the_frontier_is_told_where_staleness_was_allowed(why: Explanation) -> None:
    assert why.frontier == ()
    found = choose(TALKING, profile(spread=True), lanes(2), 16, max_staleness=1)
    told = summary(explained(found, TALKING))
    (line,) = [n for n, text in enumerate(told) if text.startswith("throughput by staleness")]
    if len(found.frontier) > 1:
        assert told[line + 1].strip().startswith("staleness 0: ")
    else:
        assert told[line].endswith("gains nothing")
