"""A dry run of an embodied recipe: what a run would miss, and what it would refuse."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

M2flow = Callable[..., Any]

RECIPE = """\
workload: embodied
mode: eager
lanes: cpu:1
environment: {name: "table:red"}
"""

REFUSED = [
    (["environment.name=table:rde"], ["table has no such task", "did you mean 'red'?"]),
    (["environment.name=gymnasum:Pendulum-v1"], ["neither a family nor", "did you mean 'gym"]),
    (["environment.name=table"], ["names no environment", "families: envpool, gymnasium"]),
    (["environment.options.pixel=32"], ["table:red has no such option", "'pixels'"]),
    (["environment.reward=no_such_module:f"], ["environment.reward", "no_such_module"]),
]


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)


@pytest.mark.parametrize(("words", "parts"), REFUSED)
def test_what_a_run_would_refuse_of_an_environment(
    words: list[str], parts: list[str], m2flow: M2flow
) -> None:
    error = m2flow("train", "recipe.yaml", "--dry-run", *words).error
    for part in parts:
        assert part in error


def test_files_and_packages_that_may_come_later_are_told(
    m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = ["environment.name=metaworld:reach-v3", "warmup={steps: 1, data: shown.npz}"]
    said = m2flow("train", "recipe.yaml", "--dry-run", *words)
    assert said.code == 0
    missed = said.out[said.out.index("what a run would miss:") :]
    assert "warmup.data: there is no shown.npz" in missed
    assert "needs metaworld, which is not installed" in missed
    assert 'pip install "m2flow[metaworld]"' in missed


def test_what_is_there_is_not_missed(m2flow: M2flow) -> None:
    said = m2flow("train", "recipe.yaml", "--dry-run")
    assert said.code == 0
    assert "what a run would miss" not in said.out
