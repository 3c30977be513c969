"""m2flow: reinforcement learning of foundation models. Write the step; m2flow plans and runs it.

Importing this package pulls in neither torch nor Ray: what needs them is loaded when it is asked
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from m2flow.errors import FlowError, M2FlowError, PlanError, RunFailed, UserError
from m2flow.flow import Batch, Flow, Isolation, Layout, Place, Ragged, Stream, Worker, loop, stage

if TYPE_CHECKING:
    from m2flow.runtime.driver.launch import Auto, Run, launch
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.transport.channel import Channel

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Batch",
    "Channel",
    "Flow",
    "FlowError",
    "Isolation",
    "LanePool",
    "Layout",
    "M2FlowError",
    "Place",
    "PlanError",
    "Ragged",
    "Run",
    "RunFailed",
    "Stream",
    "UserError",
    "Worker",
    "launch",
    "loop",
    "stage",
]


def __getattr__(name: str) -> Any:
    if name in ("launch", "Run", "Auto"):
        from m2flow.runtime.driver import launch

        return getattr(launch, name)
    if name == "Channel":
        from m2flow.runtime.transport.channel import Channel

        return Channel
    if name == "LanePool":
        from m2flow.runtime.driver.pool import LanePool

        return LanePool
    raise AttributeError(f"module 'm2flow' has no attribute {name!r}")
