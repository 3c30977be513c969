"""Processes that are stopped for good (SIGSTOP): noticed, named, and ended or healed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from m2flow.observe.ending import ending_of
from m2flow.observe.run_directory import read_metrics
from tests.chaos.disturbed import DISTURBED, Strike
from tests.chaos.test_seeded_runs import EMBODIED, QUIET_SECONDS, every_episode_counts_once
from tests.cli.conftest import TINY, run_command
from tests.cli.test_signals import Started

pytestmark = pytest.mark.slow


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    monkeypatch.chdir(tmp_path)
    runs: list[Started] = []
    yield runs
    for run in runs:
        run.end()


def halted(started: list[Started], recipe: str, strike: Strike, *words: str) -> tuple[int, str]:
    """A run in which somebody was stopped; how it has ended."""
    Path("tiny.yaml").write_text(recipe)
    program = (DISTURBED, json.dumps(asdict(strike)))
    started.append(run := Started(Path("tiny.yaml"), *words, program=program))
    _, errors = run.process.communicate(timeout=240)
    assert Path("hit").exists(), "nobody was stopped"
    return run.process.returncode, errors


LOUD = """
from m2flow.rewards.addition import addition_reward


def scored(*sample):
    print("what a lane has printed")
    return addition_reward(*sample)
"""


def test_a_lane_ends_the_run_at_its_deadline(started: list[Started]) -> None:
    Path("loud.py").write_text(LOUD)
    strike = Strike("lane", "generation", step=2, how="halt")
    words = ["mode=disaggregated", "lanes=cpu:2", "deadline_seconds=12", "evaluation.every=1000"]
    words.append("reward=loud:scored")
    begun = time.monotonic()
    code, errors = halted(started, TINY, strike, "steps=9", *words)
    assert code == 1
    assert time.monotonic() - begun < 150, "it hung, and something else has ended it"
    assert "has not finished within its deadline of 12 s" in errors
    victim = json.loads(Path("hit").read_text())["who"]
    assert f"process {victim}:" in errors
    assert "no answer; its state is T (stopped)" in errors
    printed = errors.partition("  the last of worker-")[2].splitlines()
    assert "    what a lane has printed" in printed, "of the lane that has scored"
    assert "Traceback" not in errors.partition("process ")[0]
    started[0].wait_until_quiet(QUIET_SECONDS)
    assert ending_of("run").state == "failed"
    doctor = run_command("doctor", "run")
    assert doctor.code == 0
    happened, *then = doctor.out.splitlines()
    assert "has not finished within its deadline of 12 s" in happened
    assert any("raise deadline_seconds if it is slow" in line for line in then)
    assert any(line.startswith("to go on: m2flow train ") for line in then)
    assert "its state is T (stopped)" in Path("run/failure.txt").read_text()
    resumed = [*words, "steps=9", "mode=eager", "lanes=cpu:1", "--run-dir", "run", "--resume"]
    outcome = run_command("train", "tiny.yaml", *resumed)
    assert outcome.code == 0, outcome.err
    assert [row["step"] for row in read_metrics("run")] == list(range(10))


def test_a_simulator_costs_its_episodes(started: list[Started]) -> None:
    strike = Strike("simulator", "generation", step=2, how="halt")
    code, errors = halted(started, EMBODIED, strike, "mode=eager", "lanes=cpu:1")
    assert code == 0, errors
    every_episode_counts_once(Path("run"))
    assert sum(row.get("episodes/failed", 0) for row in read_metrics("run")) >= 1
    started[0].wait_until_quiet(QUIET_SECONDS)
