"""The workers of a flow with tools, beside those of reasoning: who draws turns, who answers calls.

The columns of a trajectory are listed in `m2flow.workloads.agentic.episodes`.
"""

from __future__ import annotations

from m2flow.workloads.agentic.workers.caller import Caller
from m2flow.workloads.agentic.workers.host import AgentHost
from m2flow.workloads.agentic.workers.judge import TrajectoryVerifier, turn_advantage
from m2flow.workloads.agentic.workers.tool_user import ToolUser
from m2flow.workloads.agentic.workers.turn_generator import TurnGenerator

__all__ = [
    "AgentHost",
    "Caller",
    "ToolUser",
    "TrajectoryVerifier",
    "TurnGenerator",
    "turn_advantage",
]
