"""What programs read of a run: JSON lines, the run directory alone; version and completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import m2flow as package
from m2flow.observe.run_directory import read_metrics
from m2flow.rewards import addition

M2flow = Callable[..., Any]


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that prints."""
    right = addition.addition_reward

    def score(*arguments: Any) -> float:
        print("scoring")
        return right(*arguments)

    monkeypatch.setattr(addition, "addition_reward", score)


def test_json_is_one_object_a_line_and_nothing_else(
    tiny: Path, talkative: None, m2flow: M2flow
) -> None:
    outcome = m2flow("train", tiny, "--json", "--run-dir", "run")
    assert outcome.code == 0, outcome.err
    assert "scoring" in outcome.err
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert events[0]["event"] == "start"
    assert "tiny, seed 0, 3 steps" in events[0]["run"]
    phases = [(event["name"], event["total"]) for event in events if event["event"] == "phase"]
    assert phases == [("warm-up", 40), ("training", 3)]
    steps = [event for event in events if event["event"] == "step"]
    rows = read_metrics("run")
    assert [event["step"] for event in steps] == [0, 1, 2, 3]
    for event, row in zip(steps, rows, strict=True):
        assert event["metrics"] == {k: v for k, v in row.items() if k not in ("step", "time")}
    end = events[-1]
    assert (end["event"], end["outcome"], end["run_dir"]) == ("end", "done", "run")
    assert end["last"]["reward/mean"] == rows[-1]["reward/mean"]
    assert end["first"]["eval/accuracy"] == rows[0]["eval/accuracy"]


def test_a_terminal_may_know_ascii_alone() -> None:
    """It was shown an UnicodeEncodeError instead."""
    done = subprocess.run(
        [sys.executable, "-m", "m2flow", "recipes"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"quickstart " in done.stdout
    assert b" ?\n" in done.stdout, "the end of what is cut"


def test_json_says_that_a_run_failed(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*arguments: Any) -> float:
        raise OSError("the network is down")

    monkeypatch.setattr(addition, "addition_reward", score)
    outcome = m2flow("train", tiny, "--json", "--run-dir", "run", "evaluation.problems=0")
    assert outcome.code == 1
    end = json.loads(outcome.out.splitlines()[-1])
    assert (end["event"], end["outcome"]) == ("end", "failed")
    assert "the network is down" in end["error"]


def test_quiet_prints_the_run_directory_alone(tiny: Path, talkative: None, m2flow: M2flow) -> None:
    words = ["steps=1", "warmup.steps=0", "evaluation.problems=0"]
    outcome = m2flow("train", tiny, "--quiet", *words)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("\n") == 1
    assert (Path(outcome.out.strip()) / "report.html").is_file()


def test_one_way_to_tell(tiny: Path, refused: Callable[..., str]) -> None:
    assert "give one of the two" in refused("train", tiny, "--quiet", "--json")
    for words in (["--mode", "hybrid"], ["mode=hybrid"]):
        told = refused("train", tiny, *words, "--plan", "plan.json")
        assert "mode: --plan plan.json says how to run already (got 'hybrid')" in told
    assert refused("doctor", "run", "--links").startswith("--links: is of this machine")
    told = refused("eval", "model", "--data", "x.jsonl", "--json", "--markdown")
    assert "is another form than --json" in told
    for word in ("--quiet", "--json"):
        assert f"{word}: changes nothing of --dry-run" in refused("train", tiny, "--dry-run", word)


def test_the_version(m2flow: M2flow) -> None:
    outcome = m2flow("--version")
    assert (outcome.code, outcome.out) == (0, f"m2flow {package.__version__}\n")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("m2flow tra", {"train"}), ("m2flow train quickstart-", {"quickstart-embodied"})],
)
def test_the_shell_completes_commands_and_recipes(typed: str, offered: set[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    program = "import sys; sys.argv = ['m2flow']; from m2flow.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "_M2FLOW_COMPLETE": "complete_bash", **words},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert set(done.stdout.split()) == offered, done.stderr
