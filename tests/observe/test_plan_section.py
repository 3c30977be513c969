"""The report's section on the plan: what was predicted beside what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from m2flow.engine.spans import Span
from m2flow.observe.plan_section import _terms
from m2flow.observe.record import read_run
from m2flow.observe.report import write_report
from m2flow.observe.run_directory import RunDirectory
from m2flow.observe.trace import StepSpans
from m2flow.plan.explain import Alternative, Explanation
from m2flow.plan.explain.bottleneck import Bottleneck
from m2flow.plan.explain.flips import Flip
from m2flow.plan.file import to_json
from m2flow.plan.gantt import Gantt, GanttRow
from m2flow.plan.prediction import Prediction
from m2flow.plan.race import Tried
from m2flow.plan.units import Seconds
from m2flow.simulation.time_account import Piece
from tests.observe.test_report import check, words

GENERATE, TRAIN = "generator.generate", "learner.train"
TERMS = {"compute": 0.68, "switching": 0.02, "publishing": 0.01, "waiting": 0.11}
PREDICTED = Prediction(
    Seconds(0.41),
    Seconds(0.0),
    {0: 0.1, 1: 0.2},
    {term: Seconds(seconds) for term, seconds in TERMS.items()},
    {},
)
PIECES = (
    Piece("call", GENERATE, 0.0, 0.2),
    Piece("call", TRAIN, 0.2, 0.4),
    Piece("publish", "generator", 0.4, 0.41),
)
DECISION = Explanation(
    title="auto",
    num_lanes=2,
    items_per_step=32,
    seconds_to_decide=1.5,
    considered=12,
    stands=("generator: lanes 0-1",),
    stages=(GENERATE, TRAIN),
    predicted=PREDICTED,
    bottleneck=Bottleneck(TRAIN, (0, 1), 0.25, 0.62, "no lane has <b>time</b> left"),
    memory="",
    runners_up=(
        Alternative("collocated", "collocated", 0, 0.5, 64.0, ("gen on lane 0 & lane 1",)),
        Alternative("hybrid", "hybrid", 0, 0.6, 53.0, ()),
    ),
    ruled_out={"disaggregated": "does not fit"},
    flips=(Flip("publishing", 3.5, "collocated", (), 0.6, 0.5),),
    frontier=(),
    race=(),
    source="measured",
    assumptions=("prompts of 10 tokens",),
    timeline=Gantt(0.0, 0.41, (GanttRow((0, 1), PIECES, 0.0),)),
)


def decided(run: Path, decision: Explanation = DECISION) -> Path:
    RunDirectory(run).write_json(run / "decision.json", to_json(decision))
    return run


def test_what_was_predicted_stands_beside_what_was_measured(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    checker = check(write_report(decided(fake_run(tmp_path / "run", num_steps=4))))
    text = words(checker)
    for part in (
        "Why this plan", "410 ms", "measured (median)", "of what was predicted",
        "runner-up: collocated", "then: hybrid", "bottleneck: learner.train, 62 % of the step",
        "no lane has <b>time</b> left", "gen on lane 0 & lane 1",
        "publishing x 3.5 would make collocated the best", "assumed: prompts of 10 tokens",
        "ruled out: disaggregated, does not fit", "measured, step 4", "a lane, in the mean",
        "lanes 0-1", "decision.json",
    ):  # fmt: skip
        assert part in text, part
    assert {value for tag, name, value in checker.attributes if name == "id"} >= {
        "predicted-idle", "measured-idle",
    }  # fmt: skip
    assert "fixed by the user" not in text
    assert "Tried in real steps" not in text


def test_a_lane_without_a_span_counts_in_the_mean_over_lanes() -> None:
    """It was left out of what was measured, and counted in what was predicted."""
    table = _terms(DECISION, [StepSpans(1, 0.0, 1.0, [Span(0, TRAIN, "call", 0.0, 0.8)])])
    measured = dict(re.findall(r"<td>(\w+)</td><td>[^<]*</td><td>([^<]*)</td>", table))
    assert (measured["compute"], measured["waiting"]) == ("400 ms", "600 ms")


def test_the_race_is_a_table(tmp_path: Path, fake_run: Callable[..., Path]) -> None:
    race = (
        Tried("collocated <2>", 0.5, (0.52, 0.54, 0.53), "chosen"),
        Tried("hybrid", 0.6, (), "out of memory on lane 1"),
    )
    run = decided(fake_run(tmp_path / "run", num_steps=4), replace(DECISION, race=race))
    text = words(check(write_report(run)))
    for part in ("Tried in real steps", "collocated <2>", "530 ms", "out of memory on lane 1"):
        assert part in text, part


def test_a_prediction_that_was_corrected_says_so(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    """A plan chosen by the cold first steps was shown as if nothing had been learned since."""
    slow = replace(DECISION, predicted=replace(PREDICTED, seconds=Seconds(1.2)))
    text = words(check(write_report(decided(fake_run(tmp_path / "run", num_steps=4), slow))))
    assert "predicted since" in text
    assert "1.2 s" in text
    assert "when it was chosen" in text
    same = words(check(write_report(decided(fake_run(tmp_path / "same", num_steps=4)))))
    assert "predicted since" not in same


def test_a_fixed_mode_says_so(tmp_path: Path, fake_run: Callable[..., Path]) -> None:
    run = fake_run(tmp_path / "run", num_steps=2)
    plan = json.loads((run / "plan.json").read_text())
    del plan["predicted_seconds"]
    (run / "plan.json").write_text(json.dumps(plan))
    text = words(check(write_report(run)))
    assert "The mode was fixed by the user" in text
    assert "Why this plan" not in text


def test_a_run_without_spans_shows_the_prediction_alone(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_json(tmp_path / "plan.json", '{"mode": "auto", "placements": {}}')
    text = words(check(write_report(decided(tmp_path))))
    assert "predicted" in text
    assert "measured (median)" not in text
    assert "measured, step" not in text


def test_a_decision_that_cannot_be_read_is_told(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    run = fake_run(tmp_path / "run", num_steps=2)
    for text in ('{"title": ', '{"title": 3}', '{"decision": "x"}', "[]"):
        (run / "decision.json").write_text(text)
        assert any("decision.json" in problem for problem in read_run(run).problems)
        check(write_report(run))
