"""`m2flow dash` prints its address, answers there, and ends with Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from m2flow.observe.run_directory import RunDirectory

COMMAND = [sys.executable, "-m", "m2flow", "dash"]


@pytest.mark.usefixtures("signals_are_heard")
def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "runs" / "only", "r").append_metrics(1, {"reward/mean": 0.5})
    with subprocess.Popen(COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            with urllib.request.urlopen(address + "data", timeout=60) as answer:
                assert b'"reward/mean"' in answer.read()
            os.kill(process.pid, signal.SIGINT)
            assert "Ended." in process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 0


def test_a_folder_of_runs_is_no_run(tmp_path: Path) -> None:
    """It was shown as a run that never has a figure."""
    (tmp_path / "runs" / "first").mkdir(parents=True)
    for found, more in ((None, ""), ("run.json", "; such as runs/first, which is in it")):
        if found is not None:
            (tmp_path / "runs" / "first" / found).write_text("{}")
        done = subprocess.run(
            [*COMMAND, "runs"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        said = "error: runs: holds no run; expected a directory that m2flow train wrote"
        assert done.stderr == f"{said}{more}\n"


def test_without_runs_it_says_what_to_name(tmp_path: Path) -> None:
    done = subprocess.run(
        COMMAND, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "m2flow dash DIR" in done.stderr
