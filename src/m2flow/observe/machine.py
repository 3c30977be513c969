"""One line that says on what machine a run happened. Standard library alone; starts nothing."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from m2flow.plan.machine import usable_cores, usable_memory


def describe_machine(accelerators: Sequence[str] = ()) -> str:
    """Cores that this process may use, processor, memory, and the accelerators' names if given."""
    _, memory = usable_memory()
    parts = [f"{usable_cores():g} cores", processor_name(), f"{memory / 2**30:.0f} GiB"]
    if accelerators:
        names = sorted(set(accelerators))
        parts.append(", ".join(f"{accelerators.count(name)} x {name}" for name in names))
    else:
        parts.append("no accelerator")
    return " · ".join(part for part in parts if part)


def processor_name() -> str:
    """The processor's name as the system knows it; the architecture where it knows none."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
