"""Runs on lanes where /dev/shm cannot be written, or has no room: a clear line, or a right run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow.observe.run_directory import read_metrics
from tests.chaos.small_disk import small_disk
from tests.cli.conftest import TINY, run_command
from tests.cli.test_journal import ends_nearly_like
from tests.cli.test_signals import Started

SHM = Path("/dev/shm")
WORDS = ("steps=3", "lanes=cpu:2", "mode=disaggregated")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    return Path("tiny.yaml")


@pytest.fixture
def started() -> Iterator[list[Started]]:
    runs: list[Started] = []
    yield runs
    for run in runs:
        run.end()


def test_one_that_is_read_only_is_said_before_anything_starts(
    tiny: Path, tmp_path: Path, started: list[Started]
) -> None:
    with small_disk(SHM, "size=1m,ro", tmp_path) as disk:
        started.append(run := Started(tiny, *WORDS, enter=disk.enter))
        _, errors = run.process.communicate(timeout=120)
    assert run.process.returncode == 2, errors
    assert errors.startswith("error: /dev/shm: lanes hand items over in shared memory, which ")
    assert "Read-only file system" in errors
    assert errors.count("\n") == 1
    assert not Path("run").exists()
    assert not run.left_behind()


@pytest.mark.slow
def test_one_without_room_changes_nothing(
    tiny: Path, tmp_path: Path, started: list[Started]
) -> None:
    """Payloads take the socket; Ray keeps its own objects in files."""
    outcome = run_command("train", tiny, "steps=3", "mode=eager", "--run-dir", "straight")
    assert outcome.code == 0, outcome.err
    with small_disk(SHM, "size=64k", tmp_path) as disk:
        started.append(run := Started(tiny, *WORDS, enter=disk.enter))
        _, errors = run.process.communicate(timeout=240)
        assert run.process.returncode == 0, errors
        left = [path.name for path in disk.outside.iterdir() if path.name.startswith("m2flow")]
    assert left == []
    assert [row["step"] for row in read_metrics("run")] == [0, 1, 2, 3]
    ends_nearly_like(Path("run"), Path("straight"))
