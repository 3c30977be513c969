"""Where the device's time goes in an action: seconds by kernel, by PyTorch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MOST = 30
"""Kernels that are listed."""


def kernels_of(action: Callable[[], object]) -> dict[str, Any]:
    """Run an action once under the profiler.

    Args:
        action: waits for the device itself, or not.

    Returns:
        `ms`: the action's wall time under the profiler, `busy ms`: of the device in all kernels,
        and `kernels`: name -> [ms, times run], the longest first.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as found:
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.perf_counter() - start
    on_device = torch.autograd.DeviceType.CUDA if torch.cuda.is_available() else None
    rows = [
        row for row in found.key_averages() if on_device is None or row.device_type == on_device
    ]
    own: Callable[[Any], float] = (
        (lambda row: row.self_cpu_time_total)
        if on_device is None
        else (lambda row: row.self_device_time_total)
    )
    rows.sort(key=own, reverse=True)
    return {
        "ms": 1e3 * wall,
        "busy ms": sum(map(own, rows)) / 1e3,
        "kernels": {row.key[:120]: [own(row) / 1e3, row.count] for row in rows[:MOST]},
    }
