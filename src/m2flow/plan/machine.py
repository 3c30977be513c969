"""What this machine lets this process use: cores, memory, accelerators. Standard library only.

A container's share counts and not the host's size: limits of control groups are read, version 1
and 2, the nearest and all that hold it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
MEMORY_FILES = (
    ("memory.max", "memory.current"),  # version 2 of control groups
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
)


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
    on_linux = hasattr(os, "sched_getaffinity")
    cores: float = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    for folder in cgroup_folders("cpu", proc, cgroup):
        v1 = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
        quota_and_period = (read_text(folder / "cpu.max") or v1).split()
        if len(quota_and_period) == 2 and quota_and_period[0] not in ("max", "-1"):
            quota, period = map(int, quota_and_period)
            cores = min(cores, quota / period)
    return cores


def available_cores() -> tuple[int, ...]:
    """The CPU cores to make lanes of: as many of this process's as its quota keeps busy."""
    on_linux = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if on_linux else list(range(os.cpu_count() or 1))
    return tuple(cores[: max(1, int(usable_cores()))])


def usable_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> tuple[int, int]:
    """`(available, total)` bytes of memory: the machine's, or the cgroup's where it allows less."""
    rows = dict(
        line.split(":", 1) for line in read_text(proc / "meminfo").splitlines() if ":" in line
    )
    if not {"MemTotal", "MemAvailable"} <= rows.keys():
        raise OSError(f"{proc / 'meminfo'} does not say how much memory there is")
    total, available = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for folder in cgroup_folders("memory", proc, cgroup):
        for limit_name, usage_name in MEMORY_FILES:
            limit, usage = read_text(folder / limit_name), read_text(folder / usage_name)
            if limit.isdigit() and int(limit) < total:  # no limit: `max`, or more than there is
                total = int(limit)
                available = min(available, total - int(usage or 0))
    return max(available, 0), total


def visible_gpus() -> int:
    """NVIDIA accelerators that this process may use, counted without any library."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia*") if device.name[6:].isdigit()])


def read_text(path: Path) -> str:
    """The text of a small system file; empty where the system has no such file."""
    return path.read_text().strip() if path.is_file() else ""
