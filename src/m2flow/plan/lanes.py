"""Lane specifications: from `cpu:2`, as a recipe or the command line has it, to `LaneSpec`s."""

from __future__ import annotations

import re
from collections.abc import Sequence

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import PlanError, UserError
from m2flow.plan.machine import available_cores, visible_gpus


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


def check_machine(plan: Plan) -> None:
    """Refuse a plan whose lanes want cores or accelerators that this machine does not have.

    Raises:
        PlanError: names the lane and what it wants.
    """
    cores, num_gpus = set(available_cores()), visible_gpus()
    for lane in plan.lanes:
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
