"""Whole commands whose launcher, or a lane that may not come back, is killed within a step.

They go on with `--resume`: steps whose rollouts are there are not made again, every step and every
episode is there once, and figures and weights are those of a run that nobody disturbed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from m2flow.observe.run_directory import read_metrics
from tests.chaos.disturbed import DISTURBED, Strike
from tests.chaos.test_seeded_runs import (
    EPISODES,
    QUIET_SECONDS,
    RECIPES,
    SHORT_STEPS,
    Drawn,
    disturbed,
    ended_with,
    ends_like,
    every_episode_counts_once,
    started,
    straight,
)
from tests.cli.test_signals import Started

__all__ = ["started", "straight"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLES = {"agentic": 16, "embodied": EPISODES}
"""Of a step, by workload."""


@pytest.mark.parametrize("workload", SAMPLES)
def test_what_was_rolled_out_is_not_rolled_out_again(
    workload: str,
    straight: Callable[[str], Path],
    started: list[Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the fifth step or a later one, with a checkpoint after the third."""
    monkeypatch.chdir(tmp_path)
    strike = Strike("launcher", "generation", step=4)
    drawn = Drawn(workload, "disaggregated", journal=True, victim="launcher", strike=strike)
    assert disturbed(drawn, tmp_path, started) == "resumed"
    run = tmp_path / "run"
    ends_like(run, straight(workload), workload)
    if workload == "embodied":
        every_episode_counts_once(run)
    recalled = {row["step"]: row.get("rollouts/recalled") for row in read_metrics(run)}
    assert recalled[4] == SAMPLES[workload]
    assert recalled[8] is None


def test_a_lane_that_may_not_come_back_ends_the_run_and_a_resume_gives_what_it_would_have(
    straight: Callable[[str], Path],
    started: list[Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPES["native"][0])
    strike = json.dumps(asdict(Strike("lane", "training", step=8)))
    words = (*RECIPES["native"][1:], "mode=disaggregated", "lanes=cpu:2", "lane_restarts=0")
    started.append(Started(Path("tiny.yaml"), *words, program=(DISTURBED, strike)))
    code, errors = ended_with(started[-1])
    assert code == 1, errors
    assert "was lost: " in errors
    started[-1].wait_until_quiet(QUIET_SECONDS)
    started.append(Started(Path("tiny.yaml"), *words, "--resume"))
    code, errors = ended_with(started[-1])
    assert code == 0, errors
    ends_like(Path("run"), straight("native"), "native")


def test_with_generation_a_step_ahead(
    started: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions and lags go on from the last checkpoint, and do not start again.

    It is compared with a run on lanes that nobody disturbs: an eager one is never ahead. There is a
    checkpoint after every other step, which waits for all that is under way, and training is slow:
    so both are ahead at the same steps. The one that is hit was ahead of a checkpoint's weights.
    """
    strike = Strike("launcher", "training", step=3)
    drawn = Drawn("ahead", "disaggregated", journal=True, victim="launcher", strike=strike)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    monkeypatch.chdir(straight)
    Path("tiny.yaml").write_text(RECIPES["ahead"][0])
    started.append(Started(Path("tiny.yaml"), *drawn.words, "lanes=cpu:2"))
    code, errors = ended_with(started[-1])
    assert code == 0, errors
    monkeypatch.chdir(killed)
    assert disturbed(drawn, killed, started) == "resumed"
    for run in (straight, killed):
        rows = [row for row in read_metrics(run / "run") if row["step"]]
        steps = list(range(1, SHORT_STEPS + 1))
        assert [row["step"] for row in rows] == [row["version"] for row in rows] == steps
        assert [row["staleness/mean"] for row in rows] == [0.0, 1.0] * (SHORT_STEPS // 2)
    recalled = {row["step"]: row.get("rollouts/recalled") for row in rows}
    assert recalled[3] == recalled[4] == 16, "rollouts of a step ahead are taken as they were drawn"
    ends_like(killed / "run", straight / "run", "ahead")
