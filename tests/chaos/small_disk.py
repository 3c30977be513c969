"""A folder that is a small disk of its own: a tmpfs, seen by those commands alone that enter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """A disk that is there.

    Attributes:
        enter: words before a command that have it run in the folder, on the disk.
        outside: the folder as processes see it that have not entered.
    """

    enter: tuple[str, ...]
    outside: Path


@contextmanager
def small_disk(folder: Path, options: str, working: Path | None = None) -> Iterator[SmallDisk]:
    """Mount a tmpfs in a namespace of its own; it is gone at the end.

    Args:
        folder: where; it must be there.
        options: of the mount, such as "size=4m".
        working: where commands run that enter; the folder itself by default.
    """
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o {options} none "$0" && echo there && exec cat'
    holder = subprocess.Popen(
        ["unshare", *as_root, "--mount", "sh", "-c", mount, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "there\n":
            pytest.skip(f"no namespaces on this machine: {holder.stderr.read()}")
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        enter = ["nsenter", "--target", str(holder.pid), *user, "--mount"]
        within = ["env", "-C", str(working or folder)]
        outside = Path(f"/proc/{holder.pid}/root") / folder.relative_to("/")
        yield SmallDisk((*enter, *within), outside)
    finally:
        holder.stdin.close()
        holder.wait(10)
        holder.stdout.close()
        holder.stderr.close()
