"""A shell that removes what a process leaves that was killed, and nothing of one that was not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m2flow.runtime.transport import sweeping
from m2flow.runtime.transport.sweeping import Sweeper, sweep

KILLED = """
import os, signal, subprocess, sys
from glob import escape
from m2flow.runtime.transport import sweeping
from m2flow.runtime.transport.sweeping import Sweeper, sweep

sweeper = Sweeper()
sweeper.add(*map(escape, sys.argv[2:]), escape(sys.argv[1]) + "/pool-*")
log = open(sys.argv[2] + "/logs/of a child", "w")
child = subprocess.Popen(["sleep", "600"], stdout=log, start_new_session=True)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """So are files that come after it, and children; names are no patterns, and may hold spaces."""
    place = tmp_path / "a [folder] of * mine"
    place.mkdir()
    folder, near = place / "m2flow-ray-[x] y", place / "m2flow-ray-x y"
    for path in (folder, near):
        (path / "logs").mkdir(parents=True)
    for name in ("pool-1", "pool-2", "other-1"):
        (place / name).touch()
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(place), str(folder)],
        stdout=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGKILL
    wait_until_gone(folder)
    wait_until_gone(place / "pool-1")
    folder.mkdir()
    wait_until_gone(folder)
    assert sorted(path.name for path in place.iterdir()) == ["m2flow-ray-x y", "other-1"]
    wait_until_gone(Path(f"/proc/{int(ended.stdout)}"))


def wait_until_gone(path: Path) -> None:
    deadline = time.monotonic() + 30
    while path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def test_what_is_closed_removes_nothing(tmp_path: Path) -> None:
    sweeper = Sweeper()
    sweeper.add(str(tmp_path))
    sweeper.close()
    sweeper.close()
    assert sweeper._shell.returncode == 0
    assert tmp_path.exists()


def test_a_shell_that_was_killed_hinders_nobody(tmp_path: Path) -> None:
    sweeper = Sweeper()
    sweeper._shell.kill()
    sweeper._shell.wait()
    sweeper.add(str(tmp_path))
    sweeper.close()
    assert tmp_path.exists()


def test_folders_in_shared_memory_are_swept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was killed with its lane has left one, with weights in it."""
    monkeypatch.setattr(sweeping, "FOLDER", tmp_path)
    (tmp_path / "pool-1-vllm-x").mkdir()
    (tmp_path / "pool-1-vllm-x" / "weights").touch()
    for name in ("pool-1-0-a", "pool-2-0-a"):
        (tmp_path / name).touch()
    assert sweep("pool-1-") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["pool-2-0-a"]
