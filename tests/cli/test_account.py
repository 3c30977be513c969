"""The memory account on the command line: `train --dry-run` and `plan --cluster ... --explain`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.models.shape import PUBLISHED

M2flow = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 7 billion parameters as far as a plan reads it."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-7B"]))
    return tmp_path


def test_a_dry_run_names_every_gigabyte(
    folder: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "m2flow.workloads.common.accounting.usable_memory"
    monkeypatch.setattr(where, lambda: (20 * 10**9, 24 * 10**9))
    words = ("lanes=cpu:1", f"model.path={folder}", "--dry-run")
    outcome = m2flow("train", "qwen2.5-7b-grpo-math", *words)
    assert outcome.code == 0, outcome.err
    assert "as it begins, collocated:" in outcome.out
    assert "memory of cpu lane 0, no limit:" in outcome.out
    account, missed = outcome.out.split("what a run would miss:\n")
    assert "weights are missing" in missed
    told = [" ".join(line.split()) for line in account.splitlines()]
    for row in ("weights 30.5 GB", "moments 60.9 GB"):
        assert row in told
    assert told[-1].startswith("together ")
    assert told[-1].endswith(" GB, and this machine has 24 GB")
    monkeypatch.setattr(where, lambda: (10**12, 10**12))
    assert "this machine has" not in m2flow("train", "qwen2.5-7b-grpo-math", *words).out
    limited = m2flow("train", "qwen2.5-7b-grpo-math", *words, "lane_memory=20GB")
    assert limited.code == 0
    assert "memory: not known: generator.generate of" in limited.out


def test_the_plan_of_a_cluster_explains_its_memory(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x1xH100", "--explain")
    assert outcome.code == 0, outcome.err
    assert "memory of gpu lane 0, at most 72 GB:" in outcome.out
    for part in ("float32 weights", "while learner.train runs", "needed at once at most"):
        assert part in outcome.out
    assert "float32 weights" not in m2flow("plan", tiny, "--cluster", "1x1xH100").out
