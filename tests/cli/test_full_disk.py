"""A disk that is full at any moment: one line says where, and nothing that was saved is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import CannotWrite, UserError, writing
from m2flow.observe.jsonl import append_rows, read_rows
from m2flow.training import checkpoint
from tests.cli.test_journal import ends_nearly_like
from tests.cli.test_resume import ends_like

M2flow = Callable[..., Any]

MOMENTS = {
    "run directory": "config.yaml",
    "starting model": "the starting model",
    "samples": "samples.jsonl",
    "metrics": "metrics.jsonl",
    "torn row": "metrics.jsonl",
    "checkpoint": "the checkpoint of step 4",
    "half a checkpoint": "the checkpoint of step 4",
    "timeline": "timeline.json",
    "journal": "samples.jsonl",
    "lanes": "the checkpoint of step 4",
}
"""By moment at which the disk is full, see `full_disk`, what the line names."""

KEPT = {"metrics": 2, "torn row": 2, "checkpoint": 2, "half a checkpoint": 2, "lanes": 2}
"""By moment the step of the checkpoint that was saved before."""


@pytest.fixture(scope="module")
def straight(finished: Path, tmp_path_factory: pytest.TempPathFactory, m2flow: M2flow) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert m2flow("train", finished.parent / "tiny.yaml", "steps=4", "--run-dir", folder).code == 0
    return folder


@pytest.fixture(scope="module")
def full(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and an account of it for each moment."""
    folder = tmp_path_factory.mktemp("full")
    program = Path(__file__).with_name("full_disk.py")
    recipe = finished.parent / "tiny.yaml"
    command = [sys.executable, str(program), str(recipe), str(folder), *MOMENTS]
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode == 0:
        command = ["unshare", "-rm", *command]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_on_a_full_disk(full: Path, straight: Path, moment: str) -> None:
    if not (full / f"{moment}.json").exists():
        pytest.skip("no small disk can be mounted on this machine")
    said = json.loads((full / f"{moment}.json").read_text())
    assert said["code"] == 1
    assert said["err"].count("\n") == 1, said["err"]
    assert said["err"].startswith(f"the run failed: {MOMENTS[moment]} could not be written: ")
    assert "No space left on device" in said["err"] or "File too large" in said["err"]
    assert "/disk/run" in said["err"]
    assert "what was saved before is whole" in said["err"]
    assert "go on with --resume" in said["err"]
    assert said["left"] == [], "what was half written takes no room"
    assert said["kept"] == KEPT.get(moment, 0), "the newest checkpoint that is whole"
    assert said["resumed"] == 0
    if moment != "run directory":
        happened, *then = said["account"]
        assert f"{MOMENTS[moment]} could not be written" in happened
        assert any(line.startswith("first: make room") for line in then)
        assert any(line.startswith("to go on: m2flow train") for line in then)
    (ends_nearly_like if moment == "lanes" else ends_like)(full / moment, straight)


def test_a_report_that_cannot_be_written_is_no_failed_run(
    finished: Path, tmp_path: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a run on a disk that is mounted for reading alone."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    copy = tmp_path / "run"
    shutil.copytree(finished, copy, symlinks=True)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    outcome = m2flow("report", copy)
    assert outcome.code == 1
    assert outcome.err.startswith("failed: timeline.svg could not be written: "), outcome.err
    assert outcome.err.count("\n") == 1


def test_a_row_for_which_there_is_no_room_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may take a part of what is written before it says that there is no room."""
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from m2flow.observe.jsonl import append_rows\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))\n"
        "append_rows(Path(sys.argv[1]), [{'step': 2, 'text': 'x' * 200}])\n"
    )
    file = tmp_path / "metrics.jsonl"
    append_rows(file, [{"step": 1, "text": "y" * 50}])
    ran = subprocess.run(
        [sys.executable, "-c", program, str(file)], check=False, capture_output=True, text=True
    )
    assert "CannotWrite: metrics.jsonl could not be written" in ran.stderr
    assert "ulimit -f" in ran.stderr
    assert file.read_bytes().endswith(b'"}\n')
    assert [row["step"] for row in read_rows(file).rows] == [1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "x"), r"No space left on device, \d+\.\d MB free; make room there"),
        (OSError(30, "x"), "Read-only file system; mount it writable"),
        (RuntimeError("Error while serializing: I/O error (os error 28)"), "No space left"),
        (Exception("No space left on device (os error 122)"), "within your quota"),
    ],
)
def test_what_libraries_say_of_a_full_disk(error: Exception, words: str, tmp_path: Path) -> None:
    """safetensors and tokenizers raise errors of their own, which have no number."""
    with pytest.raises(CannotWrite, match=words) as caught, writing("it", tmp_path / "a" / "b"):
        raise error
    assert caught.value.__cause__ is error
    assert str(tmp_path / "a" / "b") in str(caught.value)


@pytest.mark.parametrize("error", [ValueError("(os error 2000)"), OSError(4, "x"), UserError("x")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, writing("it", "there"):
        raise error
    assert caught.value is error


def test_rows_are_on_the_disk_before_a_checkpoint_says_that_their_steps_are_done(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the end of the machine would leave steps without figures, which nothing takes again."""
    synced: dict[str, int] = {}
    fsync, move_latest = os.fsync, checkpoint._move_latest
    checked: list[int] = []

    def sync(descriptor: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = os.fstat(descriptor).st_size
        fsync(descriptor)

    def checking(root: Path, final: Path) -> None:
        for name in ("metrics.jsonl", "samples.jsonl"):
            assert synced[name] == (root.parent / name).stat().st_size
        checked.append(checkpoint.step_of(final))
        move_latest(root, final)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(checkpoint, "_move_latest", checking)
    outcome = m2flow("train", tiny, "--run-dir", "run", "evaluation.problems=0")
    assert outcome.code == 0, outcome.err
    assert checked == [2, 3]
