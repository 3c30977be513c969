"""The control plane: a pure state machine and the drivers that need no cluster.

Standard library only.
"""

from m2flow.engine.core import Engine
from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan

__all__ = ["EdgePlan", "Engine", "LaneSpec", "Placement", "Plan", "StagePlan"]
