"""On what machine a run happened, and with which packages. Standard library alone."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from m2flow.plan.machine import asked_of_driver, usable_cores, usable_memory

PACKAGES = ("torch", "ray", "transformers", "numpy")
"""Packages whose version may change what a run does or how fast it is."""


def package_versions() -> Mapping[str, str]:
    """The versions of m2flow, Python and `PACKAGES`, as far as they are installed."""
    found = {"m2flow": vars(sys.modules["m2flow"])["__version__"]}
    found["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # as with torch of a vendor's own build
            continue
    return found


def describe_machine() -> str:
    """Cores that this process may use, processor, memory, and the GPUs by name."""
    _, memory = usable_memory()
    names = asked_of_driver("name")
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    parts = [f"{usable_cores():g} cores", processor_name(), f"{memory / 2**30:.0f} GiB"]
    return " · ".join([*(part for part in parts if part), gpus or "no accelerator"])


def processor_name() -> str:
    """The processor's name as the system knows it; the architecture where it knows none."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
