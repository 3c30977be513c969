"""What this machine lets this process use: cores, memory, accelerators. Standard library only.

A container's share counts and not the host's size: limits of control groups are read, version 1
and 2, the nearest and all that hold it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
DRIVER_SECONDS = 60.0
"""Longest that a driver may take to answer: one that is stuck never does."""

MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),  # version 2 of control groups
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)
"""Files of the limit and of what is used, and what of that the kernel would give back."""


def cgroup_folders(controller: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """Where limits on this process may stand: its control group and all that hold it, v1 and v2."""
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = cgroup / controller if controllers else cgroup
        own = top / path.lstrip("/")
        yield own
        yield from (folder for folder in own.parents if folder.is_relative_to(top))


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """CPU cores this process may use: its affinity mask, or less where a cgroup's quota says so."""
    cores: float = len(os.sched_getaffinity(0))
    for folder in cgroup_folders("cpu", proc, cgroup):
        v1 = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
        quota_and_period = (read_text(folder / "cpu.max") or v1).split()
        if len(quota_and_period) == 2 and quota_and_period[0] not in ("max", "-1"):
            quota, period = map(int, quota_and_period)
            cores = min(cores, quota / period)
    return cores


def available_cores() -> tuple[int, ...]:
    """The CPU cores to make lanes of: as many of this process's as its quota keeps busy."""
    return tuple(sorted(os.sched_getaffinity(0))[: max(1, int(usable_cores()))])


def usable_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> tuple[int, int]:
    """`(available, total)` bytes of memory: the machine's, or the cgroup's where it allows less."""
    rows = dict(
        line.split(":", 1) for line in read_text(proc / "meminfo").splitlines() if ":" in line
    )
    if not {"MemTotal", "MemAvailable"} <= rows.keys():
        raise OSError(f"{proc / 'meminfo'} does not say how much memory there is")
    total, available = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for folder in cgroup_folders("memory", proc, cgroup):
        for limit_name, usage_name, given_back in MEMORY_FILES:
            limit, usage = read_text(folder / limit_name), read_text(folder / usage_name)
            if limit.isdigit() and int(limit) < total:  # no limit: `max`, or more than there is
                total = int(limit)
                said = dict(row.split() for row in read_text(folder / "memory.stat").splitlines())
                available = min(available, total - int(usage or 0) + int(said.get(given_back, 0)))
    return max(available, 0), total


def visible_gpus() -> int:
    """NVIDIA accelerators that this process may use, counted without any library."""
    chosen = _chosen_gpus()
    if chosen is not None:
        return len(chosen)
    return len([device for device in Path("/dev").glob("nvidia*") if device.name[6:].isdigit()])


def gpu_memory() -> tuple[int, ...]:
    """Bytes of memory of each accelerator that this process may use, in their order.

    Empty where the driver does not tell, or where a part of one (MIG) is to be used, of which it
    tells something else.
    """
    return _memory("memory.total")


def free_gpu_memory() -> tuple[int, ...]:
    """Bytes that are free now of each of the same accelerators; empty as there."""
    _asked.cache_clear()  # what is free changes
    return _memory("memory.free")


def _memory(field: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) << 20 for size in _of_each_gpu(field))
    except ValueError:  # a driver that does not know says so in words
        return ()


def gpu_names() -> tuple[str, ...]:
    """Names of the same accelerators, as their driver has them; empty where it does not tell."""
    return _of_each_gpu("name")


def gpu_numbers() -> tuple[str, ...]:
    """Numbers of what CUDA_VISIBLE_DEVICES names, among all accelerators of the machine.

    Empty where it is not set, or names one whose number the driver does not tell.
    """
    chosen = _chosen_gpus() or []
    return tuple(chosen) if all(map(str.isdigit, chosen)) else _of_each_gpu("index")


def _chosen_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, up to the first that names none; None if it is not set."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return None
    names = map(str.strip, chosen.split(","))
    return list(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))


def _of_each_gpu(field: str) -> tuple[str, ...]:
    """A field of each accelerator that this process may use, in their order; empty if not known."""
    rows = [row.split(", ") for row in asked_of_driver(f"index,uuid,{field}")]
    if any(len(row) != 3 for row in rows):
        return ()
    told = {name: value for *names, value in rows for name in names}
    chosen = _chosen_gpus()
    names = [row[0] for row in rows] if chosen is None else chosen
    found = [_told_of(name, told) for name in names]
    return tuple(value for value in found if value) if all(found) else ()


def _told_of(name: str, told: dict[str, str]) -> str:
    """Of an accelerator by its number or the beginning of its UUID; nothing if none is meant."""
    begins = name.startswith("GPU-")
    return next((told[x] for x in told if x == name or (begins and x.startswith(name))), "")


def asked_of_driver(fields: str) -> tuple[str, ...]:
    """A line for each accelerator of the machine, without a CUDA context in this process.

    Args:
        fields: what `nvidia-smi --query-gpu` is asked, separated by commas.

    Returns:
        Values separated by ", ", sizes in MiB; empty where there is no driver, or it hangs.
    """
    tool = shutil.which("nvidia-smi")
    return () if tool is None else _asked(tool, fields)


@cache
def _asked(tool: str, fields: str) -> tuple[str, ...]:
    query = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(
            query, capture_output=True, text=True, check=False, timeout=DRIVER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return ()
    return tuple(ran.stdout.splitlines()) if ran.returncode == 0 else ()


def read_text(path: Path) -> str:
    """The text of a small system file; empty where the system has no such file."""
    return path.read_text().strip() if path.is_file() else ""
