"""What the environment holds in confidence stands in no file of a run and in nothing it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

NAMES = (
    "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "SWANLAB_API_KEY",
    "AWS_SECRET_ACCESS_KEY", "DATABASE_URL",
)  # fmt: skip
CANARY = "canary-3f9a"


def told(folder: Path, *words: str) -> tuple[int, str, list[str], set[str]]:
    """The exit code, what a command prints, files that ever held a canary, and names of all files.

    Files below a folder, and the temporary ones, among them Ray's logs of lanes, which end with the
    run: each gets a second name as soon as it is seen.
    """
    secrets = {name: f"{CANARY}-{name.lower()}" for name in NAMES}
    private = Path(tempfile.mkdtemp(prefix="m2s-"))  # Ray's sockets need a short path
    (temporary := private / "t").mkdir()
    (kept := private / "k").mkdir()
    try:
        with (private / "printed").open("w+") as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", "m2flow", *words],
                cwd=folder,
                env={**os.environ, **secrets, "TMPDIR": str(temporary)},
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            deadline = time.monotonic() + 300
            while process.poll() is None:
                keep(temporary, kept)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                if time.monotonic() > deadline:
                    process.kill()
        files = [path for path in (*folder.rglob("*"), *kept.iterdir()) if path.is_file()]
        holding = [str(path) for path in files if CANARY.encode() in path.read_bytes()]
        names = {path.name for path in files}
        return process.returncode, (private / "printed").read_text(), holding, names
    finally:
        shutil.rmtree(private)


def keep(folder: Path, names: Path) -> None:
    """Give each file below a folder a second name in another one."""
    for where, _, files in os.walk(folder):
        for file in files:
            path = Path(where, file)
            with suppress(FileNotFoundError, FileExistsError):  # gone again, or seen before
                if path.is_file() and not path.is_symlink():
                    os.link(path, names / f"{path.stat().st_ino}-{file}")


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "collocated"])
def test_a_run_keeps_secrets_to_itself(tiny: Path, mode: str) -> None:
    """Configuration, records, logs of lanes, report, timeline, and what doctor makes of them."""
    keys = ("lanes=cpu:2", "steps=1", "evaluation.problems=0", "warmup.steps=0")
    words = ("train", str(tiny), "--mode", mode, "--run-dir", "run", *keys)
    code, printed, holding, names = told(Path.cwd(), *words)
    assert (code, holding) == (0, []), printed
    assert any("-worker-" in name for name in names) == (mode != "eager"), "logs of lanes"
    assert CANARY not in printed
    _, printed, holding, _ = told(Path.cwd(), "doctor", "run")
    assert CANARY not in printed
    assert holding == []


def test_a_run_that_fails_keeps_them_too(tiny: Path) -> None:
    Path("rewards_of_mine.py").write_text(
        "def score(prompt, completion, completion_ids, row):\n    return {}[completion]\n"
    )
    keys = ("reward=rewards_of_mine:score", "steps=1", "evaluation.problems=0", "warmup.steps=0")
    code, printed, holding, _ = told(Path.cwd(), "train", str(tiny), "--run-dir", "run", *keys)
    assert (code, holding) == (1, []), printed
    assert "raised KeyError" in printed
    assert CANARY not in printed


@pytest.mark.parametrize("said", ["no_such_key=1", f"data.options.api_key={CANARY}"])
def test_a_refused_key_keeps_them_too(tiny: Path, said: str) -> None:
    code, printed, holding, _ = told(Path.cwd(), "train", str(tiny), said)
    assert (code, holding) == (2, [])
    assert CANARY not in printed
