"""One line that says on what machine a run happened. Standard library alone; starts nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path


def describe_machine(accelerators: Sequence[str] = ()) -> str:
    """Cores that this process may use, processor, memory, and the accelerators' names if given."""
    parts = [f"{usable_cores()} cores", processor_name()]
    memory = memory_bytes()
    if memory is not None:
        parts.append(f"{memory / 2**30:.0f} GiB")
    if accelerators:
        names = sorted(set(accelerators))
        parts.append(", ".join(f"{accelerators.count(name)} x {name}" for name in names))
    else:
        parts.append("no accelerator")
    return " · ".join(part for part in parts if part)


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """The processor's name as the system knows it; the architecture where it knows none."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Bytes of main memory; None where the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
