"""Lane specifications: from `cpu:2`, as a recipe or the command line has it, to `LaneSpec`s."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import PlanError, UserError
from m2flow.plan.machine import available_cores, gpu_memory, visible_gpus
from m2flow.plan.profile.hardware import USABLE_MEMORY


def parse_lanes(text: str) -> tuple[LaneSpec, ...]:
    """Lanes of this machine, or of several that are alike.

    Args:
        text: `cpu:N` (N lanes that share the cores evenly), `gpu:N` (one for each of the first N
            accelerators), or `auto` (all accelerators, else a lane for each core). `MxKIND:N`,
            such as `2xcpu:1`, is the same on each of M machines, of which this one
            is the first.

    Returns:
        Lanes numbered over all machines, those of node 0 first. What the other machines have is
        not known here: their cores are numbered from 0, as many as this machine has, and at least
        one for each lane. A lane of an accelerator may take `USABLE_MEMORY` of its memory, where
        that is known: of all of it, whoever else holds some now, so that a plan does not depend on
        the moment. A lane of cores has no limit: its state would make way to a disk.

    Raises:
        UserError: the text does not parse, or asks for more than this machine has.
    """
    cores, num_gpus, text = available_cores(), visible_gpus(), text.strip()
    if text == "auto":
        text = f"gpu:{num_gpus}" if num_gpus else f"cpu:{len(cores)}"
    match = re.fullmatch(r"(?:([0-9]+)x)?(cpu|gpu):([0-9]+)", text)
    if match is None or int(match[1] or 1) < 1 or int(match[3]) < 1:
        raise UserError(
            "is not a lane specification",
            key="lanes",
            value=text,
            expected="cpu:N, gpu:N or auto, such as cpu:2, or 2xcpu:1 for two machines",
        )
    nodes, kind, count = int(match[1] or 1), match[2], int(match[3])
    there = len(cores) if kind == "cpu" else num_gpus
    if count > there:
        raise UserError(
            "asks for more lanes than the machine has",
            key="lanes",
            value=text,
            expected=f"at most {kind}:{there}" if there else f"no {kind} lane, as there is none",
            hint="`m2flow doctor` shows what this machine has, and `m2flow plan RECIPE --cluster "
            "1x8xH100` plans for lanes that are not here",
        )
    limits = [int(size * USABLE_MEMORY) for size in gpu_memory()] if kind == "gpu" else []
    lanes: list[LaneSpec] = []
    for node in range(nodes):
        numbers = cores if node == 0 else tuple(range(max(count, len(cores))))
        for n in range(count):
            gpu = n if kind == "gpu" else None
            limit = limits[n] if n < len(limits) else None
            lanes.append(LaneSpec(len(lanes), kind, numbers[n::count], gpu, limit, node))
    return tuple(lanes)


def with_memory(lanes: Sequence[LaneSpec], memory_bytes: int | None) -> tuple[LaneSpec, ...]:
    """The lanes, on each of which states and calls may take so much memory; None: any."""
    return tuple(replace(lane, memory_bytes=memory_bytes) for lane in lanes)


def check_machine(plan: Plan) -> None:
    """Refuse a plan whose lanes here want cores or accelerators that this machine does not have.

    Lanes of other machines (`node` above 0) are theirs to refuse.

    Raises:
        PlanError: names the lane and what it wants.
    """
    cores, num_gpus = set(available_cores()), visible_gpus()
    for lane in plan.lanes:
        if lane.node:
            continue
        if not set(lane.cores) <= cores:
            raise PlanError(
                f"lane {lane.id} is bound to cores that this machine does not have",
                key="lanes",
                value=sorted(set(lane.cores) - cores),
                expected=f"some of {sorted(cores)}",
            )
        if lane.gpu is not None and lane.gpu >= num_gpus:
            raise PlanError(
                f"lane {lane.id} wants an accelerator that this machine does not have",
                key="lanes",
                value=lane.gpu,
                expected=f"less than {num_gpus}",
            )
