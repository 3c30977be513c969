"""Lane specifications: from `cpu:2`, as a recipe or the command line has it, to `LaneSpec`s."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError


def available_cores() -> tuple[int, ...]:
    """CPU cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def visible_gpus() -> int:
    """NVIDIA accelerators that this process may use, counted without any library."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia*") if device.name[6:].isdigit()])


def parse_lanes(
    text: str, cores: Sequence[int] | None = None, num_gpus: int | None = None
) -> tuple[LaneSpec, ...]:
    """Lanes of this machine.

    Args:
        text: `cpu:N` (N lanes that share the cores evenly), `gpu:N` (one for each of the first N
            accelerators), or `auto` (all accelerators, else a lane for each core).
        cores: cores that may be used; by default those of this process.
        num_gpus: accelerators that may be used; by default those that are visible.

    Raises:
        UserError: the text does not parse, or asks for more than the machine has.
    """
    cores = available_cores() if cores is None else tuple(cores)
    num_gpus = visible_gpus() if num_gpus is None else num_gpus
    text = text.strip()
    if text == "auto":
        text = f"gpu:{num_gpus}" if num_gpus else f"cpu:{len(cores)}"
    match = re.fullmatch(r"(cpu|gpu):([0-9]+)", text)
    if match is None or int(match[2]) < 1:
        raise UserError(
            "is not a lane specification",
            key="lanes",
            value=text,
            expected="cpu:N, gpu:N or auto, such as cpu:2",
        )
    kind, count = match[1], int(match[2])
    there = len(cores) if kind == "cpu" else num_gpus
    if count > there:
        raise UserError(
            "asks for more lanes than the machine has",
            key="lanes",
            value=text,
            expected=f"at most {kind}:{there}" if there else f"no {kind} lane, as there is none",
            hint="`m2flow doctor` shows what this machine has",
        )
    share = [tuple(cores[lane::count]) for lane in range(count)]
    if kind == "gpu":
        return tuple(LaneSpec(n, "gpu", cores=share[n], gpu=n) for n in range(count))
    return tuple(LaneSpec(n, "cpu", cores=share[n]) for n in range(count))
