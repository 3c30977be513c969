"""Shared memory and folders that can be used; files must not outlive who made them.

A launcher that is killed can remove nothing: a shell does (`Sweeper`). If that is killed along with
it, as a scheduler or the kernel kills a whole group, the next pool does (`clear_up`). It knows who
is dead by a file beside each folder, which its launcher has locked: the kernel lets go of a lock
when a process ends, however it does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from glob import escape
from itertools import islice
from pathlib import Path

from m2flow.errors import RunFailed, UserError

FOLDER = Path("/dev/shm")

SHORT = Path("/tmp")
"""Where folders with sockets go if the path of the temporary folder is too long for them."""

LINGER_SECONDS = 60
"""How long processes of a killed launcher may go on writing before they have ended too."""

GRACE_SECONDS = 5
"""After so long they are ended, as far as they have files open in a directory that is to go."""

QUIET_SECONDS = 10
"""After so long without a new file they are taken to have ended."""

LOCK = ".lock"
"""Name of the file beside a folder, after the folder's own."""

LOCKS_AT_MOST = 1000
"""So many of them a pool looks at when it starts."""

BOOT = Path("/proc/sys/kernel/random/boot_id")

_SWEEP = f"""
trap '' HUP INT TERM
IFS=
while read -r pattern; do
  [ "$pattern" = done ] && exit 0
  set -- "$@" "$pattern"
done
second=0 quiet=0
while [ $second -lt {LINGER_SECONDS} ] && [ $quiet -lt {QUIET_SECONDS} ]; do
  second=$((second + 1)) quiet=$((quiet + 1))
  for pattern in "$@"; do
    for path in $pattern; do
      [ -e "$path" ] && quiet=0 && rm -rf -- "$path"
    done
    [ $second -lt {GRACE_SECONDS} ] && continue
    find /proc/[0-9]*/fd -lname "$pattern/*" 2>/dev/null | while read -r file; do
      process=${{file#/proc/}}
      kill -9 "${{process%%/*}}" 2>/dev/null
    done
  done
  sleep 1
done
"""
"""Read patterns; when no more can come, remove what fits them until nothing comes any more. What
a scheduler tells all processes of a job does not end it."""


def check_shared_memory() -> None:
    """Make, fill and map a page in `FOLDER`, as lanes will.

    Raises:
        UserError: it cannot be done; says why, and what helps.
    """
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
    except OSError as error:
        raise UserError(
            f"lanes hand items over in shared memory, which cannot be written: {error.strerror}",
            key=str(FOLDER),
            expected="a tmpfs with room, writable by you",
            hint="mount it so (containers: --shm-size 8g, or --ipc host), or run --mode eager",
        ) from error


def own_folder(path: Path) -> None:
    """Make a folder that this user alone can enter, or see that what is there is one.

    Raises:
        RunFailed: it is another user's, a link, or open to others.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    about = path.lstat()
    mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
    if not mine or about.st_mode & 0o077:
        raise RunFailed(
            f"{path} is no folder that this user alone can enter: somebody else may have made it; "
            "start again, or set TMPDIR to a folder of your own"
        )


def sweep(prefix: str) -> int:
    """Remove the files that killed pools of this prefix left in /dev/shm. Returns how many.

    The prefix must not belong to a pool that lives.
    """
    left = list(FOLDER.glob(f"{escape(prefix)}*"))
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return len(left)


def clear_up() -> None:
    """Remove what dead launchers of this user left in temporary folders and in /dev/shm.

    What cannot be removed stays, and is tried again by the next call. Nothing is raised.
    """
    for folder in {Path(tempfile.gettempdir()), SHORT}:
        with suppress(OSError):
            for lock in islice(folder.glob(f"m2flow-*{LOCK}"), LOCKS_AT_MOST):
                with suppress(OSError):
                    _clear_after(lock)


def _clear_after(lock: Path) -> None:
    """Remove a folder and its shared memory, and then its lock, unless somebody holds that.

    Raises:
        OSError: somebody does, or the file cannot be read.
    """
    file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would have us wait
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            return
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _machine() & set(os.read(file, 1024).decode(errors="replace").split()):
            return  # its file system may not tell us of locks on another machine
        folder = lock.with_name(lock.name.removesuffix(LOCK))
        left = [folder, *FOLDER.glob(f"{escape(folder.name)}-*")]
        for path in left:
            _remove(path)
        if not any(map(os.path.lexists, left)):
            lock.unlink()
    finally:
        os.close(file)


def _remove(path: Path) -> None:
    """Remove a file or a folder of this user, as far as it can be; a link is not followed."""
    with suppress(OSError):
        about = path.lstat()
        if about.st_uid != os.geteuid():
            return
        if stat.S_ISDIR(about.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _machine() -> set[str]:
    """What this machine is known by: its name, and a word that it has drawn when it was booted."""
    words = {os.uname().nodename}
    with suppress(OSError):
        words.add(BOOT.read_text().strip())
    return words


def _lock(path: Path) -> int | None:
    """Make a file that is locked as long as this process lives. Returns its descriptor.

    It has its name only when it is locked: nobody takes it for a dead launcher's before. Programs
    that this process starts do not inherit it. None where files cannot be locked.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, "\n".join(_machine()).encode())
        part.rename(path)
    except OSError:
        os.close(file)
        with suppress(OSError):
            part.unlink()
        return None
    return file


class Sweeper:
    """A shell that clears up if this process ends without having done so, by SIGKILL too.

    It removes files, and ends the processes that have files open in directories that are removed.

    It reads from a pipe that nobody else holds open, so that the end of this process is seen.
    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ("sh", "-c", _SWEEP),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what a terminal or a scheduler ends, it outlives
        )
        self._locks: dict[Path, int] = {}

    def guard(self, folder: Path) -> None:
        """Have a folder, and the shared memory named for it, removed if this process is killed.

        To be called before the folder is there. If the shell is killed too, `clear_up` does it.
        """
        lock = folder.with_name(f"{folder.name}{LOCK}")
        shared = f"{FOLDER}/{escape(folder.name)}-*"
        self.add(escape(str(folder)), shared, f"{escape(str(lock))}*")
        if (file := _lock(lock)) is not None:
            self._locks[lock] = file

    def add(self, *patterns: str) -> None:
        """Add patterns of paths, in the shell's syntax, whose files are removed at the end."""
        self._say("".join(f"{pattern}\n" for pattern in patterns))

    def close(self) -> None:
        """End the shell; it removes nothing. A second call does nothing.

        Folders that were guarded are nobody's any more.
        """
        for lock, file in self._locks.items():
            with suppress(OSError):
                lock.unlink()
            os.close(file)
        self._locks = {}
        assert self._shell.stdin is not None
        if not self._shell.stdin.closed:
            self._say("done\n")
            with suppress(OSError):
                self._shell.stdin.close()
        self._shell.wait()

    def _say(self, words: str) -> None:
        assert self._shell.stdin is not None
        with suppress(OSError):  # somebody has ended the shell: then nobody sweeps
            self._shell.stdin.write(words.encode())
            self._shell.stdin.flush()
