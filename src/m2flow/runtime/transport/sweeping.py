"""Shared memory that can be used, and files that must not outlive the processes that made them."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from glob import escape
from pathlib import Path

from m2flow.errors import UserError

FOLDER = Path("/dev/shm")

LINGER_SECONDS = 60
"""How long processes of a killed launcher may go on writing before they have ended too."""

GRACE_SECONDS = 5
"""After so long they are ended, as far as they have files open in a directory that is to go."""

QUIET_SECONDS = 10
"""After so long without a new file they are taken to have ended."""

_SWEEP = f"""
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
"""Read patterns; when no more can come, remove what fits them until nothing comes any more."""


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

    def add(self, *patterns: str) -> None:
        """Add patterns of paths, in the shell's syntax, whose files are removed at the end."""
        self._say("".join(f"{pattern}\n" for pattern in patterns))

    def close(self) -> None:
        """End the shell; it removes nothing. A second call does nothing."""
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
