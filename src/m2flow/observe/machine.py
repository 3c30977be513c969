"""One line that says on what machine a run happened. Standard library alone."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

from m2flow.plan.machine import usable_cores, usable_memory


def describe_machine() -> str:
    """Cores that this process may use, processor, memory, and the GPUs by name."""
    _, memory = usable_memory()
    names = gpu_names()
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    parts = [f"{usable_cores():g} cores", processor_name(), f"{memory / 2**30:.0f} GiB"]
    return " · ".join([*(part for part in parts if part), gpus or "no accelerator"])


def gpu_names() -> list[str]:
    """The GPUs that the NVIDIA driver lists, without a CUDA context in this process."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    ran = subprocess.run(query, capture_output=True, text=True, check=False)
    return ran.stdout.splitlines() if ran.returncode == 0 else []


def processor_name() -> str:
    """The processor's name as the system knows it; the architecture where it knows none."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
