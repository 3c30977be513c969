"""`reward:` of a recipe: a function beside it is trained on; what cannot be one is told in time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

M2flow = Callable[..., Any]

MODULE = """
import time

def digits(prompt, completion, completion_ids, row):
    assert row["answer"].isdigit() and isinstance(row["finished"], bool) and prompt.endswith("=")
    return sum(character.isdigit() for character in completion) / len(completion_ids)

def hangs(prompt, completion, completion_ids, row):
    time.sleep(60)
    return 1.0

def shy(prompt, completion, completion_ids, row):
    raise RuntimeError("not today")
"""

QUICK = ["warmup.steps=5", "steps=1", "evaluation.problems=0"]


@pytest.fixture(autouse=True)
def module(tiny: Path) -> Iterator[None]:
    """A module in the folder in which the command is given."""
    Path("rewards_beside_the_recipe.py").write_text(MODULE)
    yield
    sys.modules.pop("rewards_beside_the_recipe", None)


def test_a_function_of_the_user_s_is_trained_on(tiny: Path, m2flow: M2flow) -> None:
    def mean(reward: str, folder: str) -> float:
        outcome = m2flow("train", tiny, "--run-dir", folder, *QUICK, f"reward={reward}")
        assert outcome.code == 0, outcome.err
        rows = Path(folder, "metrics.jsonl").read_text().splitlines()
        return float(json.loads(rows[-1])["reward/mean"])

    digits = mean("rewards_beside_the_recipe:digits", "alone")
    assert 0 < digits < 1
    exact = mean("addition", "exact")
    both = (
        "[{function: 'rewards_beside_the_recipe:digits', weight: 2}, "
        "{function: addition, weight: -1}]"
    )
    assert mean(both, "both") == pytest.approx(2 * digits - exact)


def test_one_that_always_raises_ends_the_run(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow(
        "train", tiny, "--run-dir", "run", *QUICK, "reward=rewards_beside_the_recipe:shy"
    )
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    told = "reward rewards_beside_the_recipe:shy raised RuntimeError: not today (rewards_beside"
    assert told in line
    assert "so for all" in line
    assert "The first: prompt" in line


def test_one_that_always_hangs_ends_the_run_before_the_stage_s_deadline(
    tiny: Path, m2flow: M2flow
) -> None:
    """As any other that always fails: counted, and the samples kept."""
    reward = "reward=[{function: 'rewards_beside_the_recipe:hangs', deadline_seconds: 1}]"
    late = ["deadline_seconds=12"]  # of 16 samples, each with its second, one after the other
    outcome = m2flow("train", tiny, "--run-dir", "run", *QUICK, *late, reward)
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    assert "reward rewards_beside_the_recipe:hangs gave nothing within 1 s; so for all 16" in line
    rows = Path("run/skipped/step_000001.jsonl").read_text().splitlines()
    assert len(rows) == 16
    assert all("gave nothing within 1 s" in json.loads(row)["failure"] for row in rows)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["reward=rewards_beside_the_recipe:digit"],
            "reward: rewards_beside_the_recipe has no digit",
        ),
        (["reward=mathematics"], "reward: names no function (got 'mathematics'); expected module:"),
        (
            ["reward=[{function: math, wieght: 2}]"],
            "reward.0.wieght: unknown key; did you mean 'weight'?",
        ),
        (
            ["reward=[{function: math, weight: much}]"],
            "reward.0.weight: is wrong (got 'much'); expected a valid number",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    tiny: Path, refused: Callable[..., str], words: list[str], error: str
) -> None:
    assert refused("train", tiny, "--run-dir", "run", *words).startswith(error)
    assert not Path("run").exists()


@pytest.mark.slow
def test_lanes_find_the_module_too(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow(
        "train", tiny, "--run-dir", "run", *QUICK, "mode=collocated", "lanes=cpu:1",
        "reward=rewards_beside_the_recipe:digits",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
