"""`m2flow plan` and `--dry-run`: what would run, in full, with nothing started or written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from m2flow.workloads.reasoning.config import ReasoningRecipe

M2flow = Callable[..., Any]

STAGES = ["generator.generate", "verifier.score", "group_advantage", "learner.train"]


def leaves(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every key with dots, and its value."""
    found = {}
    for key, value in table.items():
        inner = isinstance(value, dict) and bool(value)
        found |= leaves(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return found


def test_a_dry_run_says_everything(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("train", tiny, "--dry-run", "seed=7")
    assert (outcome.code, outcome.err) == (0, "")
    assert list(Path().iterdir()) == [tiny]
    config, rest = outcome.out.split("derived:\n")
    resolved = yaml.safe_load(config)
    assert ReasoningRecipe.model_validate(resolved).seed == 7
    assert leaves(resolved).keys() >= leaves(ReasoningRecipe().model_dump(mode="json")).keys() - {
        "data.options"
    }
    derived, rest = rest.split("flow:\n")
    assert yaml.safe_load(derived) == {
        "samples_per_step": 16,
        "samples_per_minibatch": 8,
        "optimizer_steps": 6,
        "prompts_total": 12,
    }
    graph, plan = rest.split("plan:")
    for stage in STAGES:
        assert stage in graph
        assert stage in plan
    assert "eager, 1 lane(s)" in plan


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["plan", "--explain"]])
def test_neither_torch_nor_ray_is_needed(tiny: Path, command: list[str]) -> None:
    code = (
        "import sys\n"
        "from m2flow.cli.app import main\n"
        f"sys.argv = ['m2flow', *{[*command, str(tiny)]!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'math_verify', 'reasoning_gym'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == "[]\n"
    assert "learner.train" in ran.stdout
    assert list(Path().iterdir()) == [tiny]


def test_a_plan_in_words(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--explain")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"learner\.train +16 items, 1 replica.*, 2 mini-batches", outcome.out)


@pytest.mark.parametrize("mode", ["eager", "collocated", "disaggregated", "hybrid"])
def test_a_plan_makes_the_round_trip(
    tiny: Path, m2flow: M2flow, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m2flow.plan.lanes.available_cores", lambda: (0, 1))
    lanes = "lanes=cpu:2"
    first = m2flow("plan", tiny, "--json", "--mode", mode, lanes, "deadline_seconds=77")
    assert (first.code, first.err) == (0, "")
    plan = first.plan
    assert (plan.mode, plan.deadline_seconds) == (mode, 77)
    Path("plan.json").write_text(first.out)
    assert m2flow("plan", tiny, "--json", "--plan", "plan.json").out == first.out
    words = m2flow("plan", tiny, "--explain", "--mode", mode, lanes).out
    assert m2flow("plan", tiny, "--explain", "--plan", "plan.json").out == words
    dry = m2flow("train", tiny, "--dry-run", "--plan", "plan.json")
    assert dry.code == 0
    assert f"plan: {mode}" in dry.out


def test_json_stays_json_beside_the_words(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--json", "--explain")
    assert json.loads(outcome.out)["mode"] == "eager"
    assert "learner.train" in outcome.err


def test_help(m2flow: M2flow) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "m2flow", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("train", "plan", "eval", "report", "doctor"):
        assert command in ran.stdout
    for words in ([], ["--help"], ["train", "--help"], ["eval", "--help"]):
        outcome = m2flow(*words)
        assert (outcome.code, outcome.err) == (0, "")
        assert "Usage" in outcome.out


def test_a_refusal_of_the_installed_program(tiny: Path) -> None:
    """The same through a process of its own: exit code, one line, nothing on standard output."""
    words = ["-m", "m2flow", "train", str(tiny), "promts_per_step=4"]
    ran = subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "error: promts_per_step: unknown key; did you mean 'prompts_per_step'?\n"
    assert list(Path().iterdir()) == [tiny]
