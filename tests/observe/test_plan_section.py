"""The report's section on the plan: what was predicted beside what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.observe.record import read_run
from m2flow.observe.report import write_report
from m2flow.observe.run_directory import RunDirectory
from tests.observe.test_report import check, words

DECISION: dict[str, Any] = {
    "title": "auto",
    "predicted": {
        "seconds": 0.41,
        "idle": {"0": 0.1, "1": 0.2},
        "idle_mean": 0.15,
        "terms": {"compute": 0.68, "switching": 0.02, "publishing": 0.01, "waiting": 0.11},
    },
    "bottleneck": {"what": "learner.train", "share": 0.62, "why": "no lane has <b>time</b> left"},
    "runners_up": [
        {
            "title": "collocated",
            "predicted": {"seconds": 0.5},
            "changes": ["gen on lane 0 & lane 1"],
        },
        {"title": "hybrid", "predicted": {"seconds": 0.6}, "changes": []},
    ],
    "flips": [{"input": "publishing", "factor": 3.5, "mode": "collocated"}],
    "assumptions": ["prompts of 10 tokens"],
    "stages": ["generator.generate", "learner.train"],
    "timeline": {
        "seconds": 0.41,
        "rows": [
            {
                "lanes": [0, 1],
                "pieces": [
                    {"kind": "call", "name": "generator.generate", "start": 0.0, "end": 0.2},
                    {"kind": "call", "name": "learner.train", "start": 0.2, "end": 0.4},
                    {"kind": "publish", "name": "generator", "start": 0.4, "end": 0.41},
                ],
            }
        ],
    },
}


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_was_predicted_stands_beside_what_was_measured(
    tmp_path: Path, fake_run: Callable[..., Path], wrapped: bool
) -> None:
    """`decision.json` is either the decision alone, or the plan with it, as `--json` prints."""
    run = fake_run(tmp_path / "run", num_steps=4)
    RunDirectory(run).write_decision({"decision": DECISION} if wrapped else DECISION)
    checker = check(write_report(run))
    text = words(checker)
    for part in (
        "Why this plan", "410 ms", "measured (median)", "of what was predicted",
        "runner-up: collocated", "then: hybrid", "bottleneck: learner.train, 62 % of the step",
        "No lane has <b>time</b> left", "gen on lane 0 & lane 1",
        "publishing x 3.5 would make collocated the best", "assumed: prompts of 10 tokens",
        "measured, step 4", "a lane, in the mean", "0 +1", "decision.json",
    ):  # fmt: skip
        assert part in text, part
    assert {value for tag, name, value in checker.attributes if name == "id"} >= {
        "predicted-idle", "measured-idle",
    }  # fmt: skip
    assert "fixed by the user" not in text


def test_a_fixed_mode_says_so(tmp_path: Path, fake_run: Callable[..., Path]) -> None:
    run = fake_run(tmp_path / "run", num_steps=2)
    plan = json.loads((run / "plan.json").read_text())
    del plan["predicted_seconds"]
    (run / "plan.json").write_text(json.dumps(plan))
    text = words(check(write_report(run)))
    assert "The mode was fixed by the user" in text
    assert "Why this plan" not in text


def test_a_run_without_spans_shows_the_prediction_alone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_plan({"mode": "auto", "placements": {}})
    directory.write_decision(DECISION)
    text = words(check(write_report(tmp_path)))
    assert "predicted" in text
    assert "measured" not in text


@pytest.mark.parametrize(
    "spoiled",
    [
        {},
        {"decision": "x"},
        {"predicted": 3, "bottleneck": [], "runners_up": "x", "flips": {}, "timeline": None},
        {"predicted": {"seconds": "x", "terms": [1]}, "runners_up": [1], "flips": [None]},
        {"timeline": {"seconds": 1, "rows": [{"lanes": 3, "pieces": [{"kind": "?"}, 7]}, 1]}},
        {
            "timeline": {
                "seconds": 1,
                "rows": [{"pieces": [{"kind": "call", "start": 1, "end": 0}]}],
            }
        },
    ],
)
def test_a_spoiled_decision_never_stops_the_report(
    tmp_path: Path, fake_run: Callable[..., Path], spoiled: dict[str, Any]
) -> None:
    run = fake_run(tmp_path / "run", num_steps=2)
    RunDirectory(run).write_decision(spoiled)
    check(write_report(run))


def test_a_torn_decision_is_told(tmp_path: Path, fake_run: Callable[..., Path]) -> None:
    run = fake_run(tmp_path / "run", num_steps=2)
    (run / "decision.json").write_text('{"decision": ')
    assert any("decision.json" in problem for problem in read_run(run).problems)
    check(write_report(run))
