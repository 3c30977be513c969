"""What the environment holds in confidence stands in no file of a run and in nothing it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = (
    "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "SWANLAB_API_KEY",
    "AWS_SECRET_ACCESS_KEY", "DATABASE_URL",
)  # fmt: skip
CANARY = "canary-3f9a"


def told(folder: Path, *words: str) -> tuple[int, str, list[str]]:
    """The exit code, all that a command prints, and the files below a folder with a canary."""
    secrets = {name: f"{CANARY}-{name.lower()}" for name in NAMES}
    done = subprocess.run(
        [sys.executable, "-m", "m2flow", *words],
        cwd=folder,
        env={**os.environ, **secrets},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    files = [path for path in folder.rglob("*") if path.is_file()]
    holding = [str(path) for path in files if CANARY.encode() in path.read_bytes()]
    return done.returncode, done.stdout + done.stderr, holding


@pytest.mark.parametrize("mode", ["eager", "collocated"])
def test_a_run_keeps_secrets_to_itself(tiny: Path, mode: str) -> None:
    """Configuration, records, logs of lanes, report, timeline, and what doctor makes of them."""
    keys = ("lanes=cpu:2", "steps=1", "evaluation.problems=0", "warmup.steps=0")
    words = ("train", str(tiny), "--mode", mode, "--run-dir", "run", *keys)
    code, printed, holding = told(Path.cwd(), *words)
    assert (code, holding) == (0, []), printed
    assert CANARY not in printed
    _, printed, holding = told(Path.cwd(), "doctor", "run")
    assert CANARY not in printed
    assert holding == []


def test_a_run_that_fails_keeps_them_too(tiny: Path) -> None:
    Path("rewards_of_mine.py").write_text(
        "def score(prompt, completion, completion_ids, row):\n    return {}[completion]\n"
    )
    keys = ("reward=rewards_of_mine:score", "steps=1", "evaluation.problems=0", "warmup.steps=0")
    code, printed, holding = told(Path.cwd(), "train", str(tiny), "--run-dir", "run", *keys)
    assert (code, holding) == (1, []), printed
    assert "raised KeyError" in printed
    assert CANARY not in printed


def test_a_refused_key_keeps_them_too(tiny: Path) -> None:
    code, printed, holding = told(Path.cwd(), "train", str(tiny), "no_such_key=1")
    assert (code, holding) == (2, [])
    assert CANARY not in printed
