"""A project of one's own: what `m2flow init` writes passes its test, and its recipe trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

M2flow = Callable[..., Any]

FILES = {"README.md", "my_flow.py", "my_reward.py", "recipe.yaml", "test_project.py"}


def in_project(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m WORDS` in the project, as its owner would."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def project(tmp_path: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    outcome = m2flow("init", "a project/mine")
    assert outcome.code == 0, outcome.err
    assert "cd 'a project/mine' && m2flow train recipe.yaml" in outcome.out
    return tmp_path / "a project" / "mine"


def test_a_project_passes_its_test_and_trains(project: Path) -> None:
    assert {path.name for path in project.iterdir()} == FILES
    tested = in_project(project, "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    trained = in_project(
        project, "m2flow", "train", "recipe.yaml", "--mode", "eager", "--run-dir", "run"
    )
    assert trained.returncode == 0, trained.stderr
    rows = [json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    first, last = (sum(row["reward/mean"] for row in part) / 10 for part in (rows[:10], rows[-10:]))
    assert last > first + 0.05


def test_the_test_of_a_project_finds_a_broken_reward(project: Path) -> None:
    reward = project / "my_reward.py"
    reward.write_text(reward.read_text().replace("else 0.2", "else 0.3"))
    tested = in_project(project, "pytest", "-q", "-p", "no:cacheprovider", "-k", "reward")
    assert tested.returncode == 1
    assert "1 failed" in tested.stdout


def test_a_folder_that_is_not_empty_is_refused(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/notes.txt").write_text("mine")
    assert "there: is not empty: notes.txt is there" in refused("init", "there")
    assert "cannot be written" in refused("init", "there/notes.txt")


def test_an_empty_repository_is_taken(
    tmp_path: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".git").mkdir()
    assert m2flow("init", ".").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, ".git"}
