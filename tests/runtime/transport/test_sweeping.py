"""What a process leaves that was killed is removed, and nothing of one that was not."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow.errors import RunFailed
from m2flow.runtime.transport import sweeping
from m2flow.runtime.transport.sweeping import Sweeper, clear_up, own_folder, sweep

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


HEARD = """
import os, signal, sys, time
from m2flow.runtime.transport.sweeping import Sweeper

sweeper = Sweeper()
sweeper.add(sys.argv[1])
deadline = time.monotonic() + 10
while time.monotonic() < deadline:  # until the shell has begun
    lines = open(f"/proc/{sweeper._shell.pid}/status").read().splitlines()
    (ignored,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    if ignored >> (signal.SIGTERM - 1) & 1:
        break
    time.sleep(0.01)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    os.kill(sweeper._shell.pid, number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_tells_a_whole_job_to_end_does_not_end_the_shell(tmp_path: Path) -> None:
    """A scheduler tells each process of a job; a launcher's files stayed if it was killed then."""
    folder = tmp_path / "pool"
    folder.mkdir()
    command = [sys.executable, "-c", HEARD, str(folder)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    wait_until_gone(folder)


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


GUARDED = """
import os, signal, subprocess, sys, tempfile
from pathlib import Path
from m2flow.runtime.transport import sweeping

sweeping.FOLDER = Path(sys.argv[1])
sweeper = sweeping.Sweeper()
folder = Path(tempfile.gettempdir(), "m2flow-0123456789ab")
sweeper.guard(folder)
(folder / "logs").mkdir(parents=True)
(folder / "logs/of a lane").touch()
(sweeping.FOLDER / f"{folder.name}-0-a").touch()
(sweeping.FOLDER / f"{folder.name}-vllm-b").mkdir()
child = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=subprocess.DEVNULL)
print(sweeper._shell.pid, child.pid, flush=True)
sys.stdin.read()
"""
"""A launcher, its shell, and a program that gets every descriptor that is not closed for it."""

NAME = "m2flow-0123456789ab"


class Places:
    """A temporary folder, and one that stands for /dev/shm; what lies in both."""

    def __init__(self, top: Path) -> None:
        self.temporary, self.shared = top / "tmp", top / "shm"
        self.temporary.mkdir()
        self.shared.mkdir()

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in (*self.temporary.iterdir(), *self.shared.iterdir()))


WHOLE = [NAME, f"{NAME}-0-a", f"{NAME}-vllm-b", f"{NAME}.lock"]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    places = Places(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(places.temporary))
    monkeypatch.setattr(sweeping, "FOLDER", places.shared)
    monkeypatch.setattr(sweeping, "SHORT", places.temporary)
    return places


@pytest.fixture
def launcher(places: Places) -> Iterator[subprocess.Popen[str]]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(places.shared)],
        env={**os.environ, "TMPDIR": str(places.temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield launcher
    launcher.kill()
    launcher.communicate()


def killed_with_its_shell(launcher: subprocess.Popen[str]) -> int:
    """The shell first: it would see the launcher's end. Returns the program, which goes on."""
    assert launcher.stdout is not None
    shell, program = map(int, launcher.stdout.readline().split())
    os.kill(shell, signal.SIGKILL)
    launcher.kill()
    launcher.wait()
    return program


def test_the_next_pool_removes_what_nobody_else_can(
    places: Places, launcher: subprocess.Popen[str]
) -> None:
    """A launcher and its shell were killed together; what it had started holds no lock."""
    program = killed_with_its_shell(launcher)
    try:
        time.sleep(1.5)  # a shell that lives would have begun
        assert places.left == WHOLE
        clear_up()
        assert places.left == []
    finally:
        os.kill(program, signal.SIGKILL)


def test_what_was_left_where_paths_are_short_is_removed_too(
    places: Places, launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a launcher with a long TMPDIR, which may be another one by now."""
    os.kill(killed_with_its_shell(launcher), signal.SIGKILL)
    monkeypatch.setattr(tempfile, "tempdir", str(places.shared))
    clear_up()
    assert places.left == []


def test_a_pool_that_lives_is_left_alone(places: Places, launcher: subprocess.Popen[str]) -> None:
    """Also one of this process, whose next pool asks; and one that is being made."""
    assert launcher.stdout is not None
    _, program = map(int, launcher.stdout.readline().split())
    own, sweeper = places.temporary / "m2flow-ba9876543210", Sweeper()
    sweeper.guard(own)
    clear_up()
    assert places.left == [*WHOLE, f"{own.name}.lock"]
    own.mkdir()
    clear_up()
    assert places.left == [*WHOLE, own.name, f"{own.name}.lock"]
    own.rmdir()
    sweeper.close()
    assert places.left == WHOLE
    os.kill(program, signal.SIGKILL)


def test_a_lock_has_its_name_when_it_is_held(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a pool that is being made would be taken for a dead one."""
    lock, seen = fcntl.flock, list[list[str]]()

    def flock(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        clear_up()  # another pool starts in this moment
        seen.append(places.left)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    sweeper = Sweeper()
    sweeper.guard(places.temporary / NAME)
    assert seen == [[f"{NAME}.lock.part"]]
    assert places.left == [f"{NAME}.lock"]
    sweeper.close()
    assert places.left == []


def test_what_has_no_lock_file_is_left_alone(
    places: Places, launcher: subprocess.Popen[str]
) -> None:
    """Such as a folder of an older m2flow; beside it, one that is removed."""
    os.kill(killed_with_its_shell(launcher), signal.SIGKILL)
    others = ["m2flow-ba9876543210", "m2flow-ba9876543210-0-a", "m2flow-ray-01234567"]
    (places.temporary / others[0]).mkdir()
    (places.temporary / others[2]).write_text("\n".join(sweeping._machine()))
    (places.shared / others[1]).touch()
    clear_up()
    assert places.left == others


def test_links_and_files_of_others_are_left_alone(
    places: Places, launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(killed_with_its_shell(launcher), signal.SIGKILL)
    lock, alone = (places.temporary / f"{name}.lock" for name in (NAME, "m2flow-ba9876543210"))
    alone.write_text("\n".join(sweeping._machine()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        clear_up()
        assert places.left == [*WHOLE, alone.name]
    alone.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "_machine", lambda: {"another"})
        clear_up()
        assert places.left == WHOLE
    moved = lock.rename(places.temporary / "elsewhere")
    lock.symlink_to(moved)
    os.mkfifo(alone)
    clear_up()
    assert places.left == ["elsewhere", *WHOLE, alone.name]
    moved.replace(lock)
    precious = places.temporary.parent / "precious"
    (precious / "data").mkdir(parents=True)
    (places.temporary / NAME).rename(places.temporary.parent / "moved")
    (places.temporary / NAME).symlink_to(precious)
    (places.shared / f"{NAME}-link").symlink_to(precious)
    clear_up()
    assert places.left == [alone.name]
    assert (precious / "data").is_dir()


def test_what_cannot_be_removed_is_tried_again(
    places: Places, launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(killed_with_its_shell(launcher), signal.SIGKILL)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        clear_up()
    assert places.left == [WHOLE[0], *WHOLE[2:]]
    clear_up()
    assert places.left == []


def test_without_locks_a_pool_starts_all_the_same(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    sweeper = Sweeper()
    sweeper.guard(places.temporary / NAME)
    clear_up()
    assert places.left == []
    monkeypatch.setattr(tempfile, "tempdir", str(places.temporary / "gone"))
    sweeper.guard(places.temporary / "gone" / NAME)
    clear_up()
    sweeper.close()


def test_a_folder_of_ones_own_is_open_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is known as soon as its lock is there: another user could make it first."""
    folder = tmp_path / "m2flow-some"
    for _ in range(2):
        own_folder(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    link, file, wide = (tmp_path / name for name in ("link", "file", "wide"))
    link.symlink_to(folder)
    file.touch(mode=0o600)
    wide.mkdir(mode=0o755)
    for other in (link, file, wide):
        with pytest.raises(RunFailed, match=f"{other} is no folder that this user alone can enter"):
            own_folder(other)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RunFailed, match="somebody else may have made it"):
        own_folder(folder)
