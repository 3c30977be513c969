"""Whole commands whose processes are killed or stopped at random: they end like undisturbed ones.

A seed draws the mode, who is hit and when. Who ended the launcher goes on with `--resume`, as the
message of a run that was killed says. In the end figures and weights are those of an eager run that
nobody disturbed, up to the order of sums, and no process, file or shared memory is left.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from m2flow.observe.run_directory import read_metrics
from tests.cli.conftest import TINY, run_command
from tests.cli.test_resume import figures
from tests.cli.test_signals import Started

pytestmark = pytest.mark.slow

STEPS = 14
MODES = ("collocated", "disaggregated", "auto")
VICTIMS = ("lane", "launcher", "ray", "stopped")
"""A lane's process, the launcher, Ray's process of this node; a lane that sleeps for a while."""

MODEL = "checkpoints/latest/model/model.safetensors"

OF_THE_PLAN = ("publish/", "lanes/", "train/tokens_computed")
"""Figures that differ between plans, or tell of lost lanes."""

STOPPED_SECONDS = 2.0
END_SECONDS = 240.0

QUIET_SECONDS = 60.0
"""Longest that what a killed launcher leaves may stay: Ray's processes end one after the other."""

WORDS = ("lanes=cpu:2", f"steps={STEPS}", "checkpoint.every=3", "evaluation.every=1000")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    (folder / "tiny.yaml").write_text(TINY)
    run = folder / "run"
    outcome = run_command("train", folder / "tiny.yaml", *WORDS, "--run-dir", run, "mode=eager")
    assert outcome.code == 0, outcome.err
    return run


@pytest.fixture
def started() -> Iterator[list[Started]]:
    runs: list[Started] = []
    yield runs
    for run in runs:
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.communicate()


@pytest.mark.parametrize("seed", range(30))
def test_a_disturbed_run_ends_like_an_undisturbed_one(
    seed: int,
    straight: Path,
    started: list[Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = Path("tiny.yaml")
    tiny.write_text(TINY)
    drawn = random.Random(seed)
    mode, victim = drawn.choice(MODES), VICTIMS[seed % len(VICTIMS)]
    at_step, later = drawn.randrange(0, STEPS - 2), drawn.uniform(0.0, 0.5)
    run = Started(tiny, *WORDS, f"mode={mode}")
    started.append(run)
    run.wait_for(lambda: steps_done() >= at_step)
    time.sleep(later)
    strike(run, victim, drawn)
    code, errors = ended(run)
    if victim in ("lane", "stopped"):
        assert code == 0, (mode, errors)
    if code:
        assert "Traceback" not in errors
        wait_until_quiet(run)
        again = Started(tiny, *WORDS, f"mode={mode}", *resume())
        started.append(again)
        code, errors = ended(again)
        assert code == 0, (mode, victim, errors)
        wait_until_quiet(again)
    wait_until_quiet(run)
    for row, wanted in zip(figures(Path("run")), figures(straight), strict=True):
        expected = {key: x for key, x in wanted.items() if not key.startswith(OF_THE_PLAN)}
        found = {key: row.get(key) for key in expected}
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    here, there = (load_file(x / MODEL) for x in (Path("run"), straight))
    for key, tensor in there.items():
        assert here[key].allclose(tensor, rtol=0, atol=1e-4), key


def steps_done() -> int:
    """The last step whose figures are there; -1 before there are any."""
    return max((row["step"] for row in read_metrics("run")), default=-1)


def resume() -> list[str]:
    """A run that was killed before it had a configuration begins anew."""
    return ["--resume"] if Path("run/config.yaml").exists() else []


def strike(run: Started, victim: str, drawn: random.Random) -> None:
    """Kill or stop somebody; whoever has ended meanwhile cannot be hit any more."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if victim == "launcher":
            run.process.kill()
            return
        word = "raylet/raylet" if victim == "ray" else "ray::LaneProcess.serve"
        found = processes(run.process.pid, lambda line: word in line)
        if not found:
            return
        process = drawn.choice(found)
        if victim == "stopped":
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            process.send_signal(signal.SIGCONT)
        else:
            process.kill()


def processes(parent: int, fits: Callable[[str], Any]) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if fits(" ".join(process.cmdline())):
                found.append(process)
    return sorted(found, key=lambda one: one.pid)


def ended(run: Started) -> tuple[int, str]:
    _, errors = run.process.communicate(timeout=END_SECONDS)
    return run.process.returncode, errors


def wait_until_quiet(run: Started) -> None:
    deadline = time.monotonic() + QUIET_SECONDS
    while left := run.left_behind():
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
