"""What a folder is like at each system call of some processes: where they could have been killed.

    moments = moments_of(folder, processes, work)

Each of the processes is stopped (ptrace) before and after each of its system calls while `work`
runs, and the folder is read there. A thread is within one call at most, so what is read is what is
left if all of them are killed there. Threads that had been started before are not stopped, and
must leave the folder alone. The processes are killed in the end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

Tree = Mapping[str, bytes | None]
"""Content of files by path, None for a folder, `LINK` and where it leads for a link."""

LINK = b"link to "
SEIZE, INTERRUPT, GO_TO_NEXT_CALL = 0x4206, 0x4207, 24  # linux/ptrace.h
OPTIONS = 0x01 | 0x02 | 0x04 | 0x08  # mark system calls; follow forks and threads
AT_CALL = signal.SIGTRAP | 0x80
IDLE_SECONDS, END_SECONDS = 0.0005, 60.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long] * 4
_libc.ptrace.restype = ctypes.c_long


def moments_of(
    folder: Path, processes: Sequence[int], work: Callable[[], Any]
) -> tuple[list[Tree], int]:
    """What the folder was like, each state once and in order; and how many calls there were.

    Where a file has grown in one call, there is a state with half of what was added.
    """
    found, calls, seen = [tree_of(folder)], 0, signature(folder)
    for process in processes:
        _ptrace(SEIZE, process, OPTIONS)
        _ptrace(INTERRUPT, process, 0)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
        try:
            while not done.done():
                thread_id, status = _wait()
                if not thread_id:
                    time.sleep(IDLE_SECONDS)
                    continue
                if not os.WIFSTOPPED(status):
                    continue
                what = os.WSTOPSIG(status)
                if what == AT_CALL:
                    calls += 1
                    if (now := signature(folder)) != seen:
                        seen = now
                        found += _between(found[-1], tree_of(folder))
                is_signal = what != AT_CALL and not status >> 16
                with suppress(ProcessLookupError):
                    _ptrace(GO_TO_NEXT_CALL, thread_id, what if is_signal else 0)
        finally:
            _kill(processes)
        done.result()
    return [*found, *_between(found[-1], tree_of(folder))], calls // 2


def tree_of(folder: Path) -> Tree:
    """All that lies there; what vanishes while it is read counts as gone."""
    found: dict[str, bytes | None] = {}
    for path in _paths(folder):
        name = str(path.relative_to(folder))
        with suppress(FileNotFoundError):
            if path.is_symlink():
                found[name] = LINK + os.fsencode(path.readlink())
            elif path.is_dir():
                found[name] = None
            else:
                found[name] = path.read_bytes()
    return found


def signature(folder: Path) -> list[tuple[Any, ...]]:
    """Cheap to compare: changes when anything there does."""
    found = []
    for path in _paths(folder):
        with suppress(FileNotFoundError):
            here = path.lstat()
            found.append((path, here.st_ino, here.st_size, here.st_mtime_ns))
    return found


def plant(tree: Tree, folder: Path) -> None:
    """Make a folder that is like this."""
    folder.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif content.startswith(LINK):
            path.symlink_to(os.fsdecode(content.removeprefix(LINK)))
        else:
            path.write_bytes(content)


def _between(before: Tree, after: Tree) -> list[Tree]:
    """What comes after a state: half-way there, where a file has grown; then the next one."""
    if after == before:
        return []
    half = dict(after)
    for name, content in after.items():
        old = before.get(name)
        if content is None or content.startswith(LINK) or old is None or content == old:
            continue
        half[name] = content[: (len(old) + len(content)) // 2]
    return [after] if half == after else [half, after]


def _paths(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            children = sorted(Path(entry.path) for entry in entries)
    except FileNotFoundError:
        return
    for path in children:
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _paths(path)


def _kill(processes: Sequence[int]) -> None:
    """And take notice of their ends, for which their parents wait until then."""
    for process in processes:
        os.kill(process, signal.SIGKILL)
    left, deadline = set(processes), time.monotonic() + END_SECONDS
    while left and time.monotonic() < deadline:
        thread, status = _wait()
        if thread and not os.WIFSTOPPED(status):
            left.discard(thread)
        elif not thread:
            time.sleep(IDLE_SECONDS)


def _ptrace(request: int, process: int, data: int) -> None:
    if _libc.ptrace(request, process, 0, data) == -1:
        number = ctypes.get_errno()
        kind = ProcessLookupError if number == errno.ESRCH else OSError
        raise kind(number, f"ptrace: {os.strerror(number)}")


def _wait() -> tuple[int, int]:
    """The next thread that has stopped or ended, and how; 0 if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG | 0x40000000)  # __WALL: threads as well
    except ChildProcessError:
        return 0, 0
