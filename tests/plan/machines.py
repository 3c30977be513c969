"""Lanes of machines that are not this one."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from m2flow.engine.plan import LaneSpec
from m2flow.plan import parse_lanes


def lanes_on(
    text: str, cores: Sequence[int], num_gpus: int = 0, memory: Sequence[int] = ()
) -> tuple[LaneSpec, ...]:
    """What a text means on a machine with these cores and accelerators, and bytes of each."""
    with patch.multiple(
        "m2flow.plan.lanes",
        available_cores=lambda: tuple(cores),
        visible_gpus=lambda: num_gpus,
        gpu_memory=lambda: tuple(memory),
    ):
        return parse_lanes(text)
