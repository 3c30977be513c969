"""The micro flow: plans, their files, their validation, and the builders of the fixed modes."""

from __future__ import annotations

from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan
from m2flow.plan.builders import build_plan, companion
from m2flow.plan.describe import describe_plan
from m2flow.plan.file import read_plan, to_json
from m2flow.plan.isolation import isolated_workers
from m2flow.plan.lanes import check_machine, parse_lanes, with_memory
from m2flow.plan.memory import with_sizes
from m2flow.plan.sizes import parse_bytes
from m2flow.plan.validate import validate

__all__ = [
    "EdgePlan",
    "LaneSpec",
    "Placement",
    "Plan",
    "StagePlan",
    "build_plan",
    "check_machine",
    "companion",
    "describe_plan",
    "isolated_workers",
    "parse_bytes",
    "parse_lanes",
    "read_plan",
    "to_json",
    "validate",
    "with_memory",
    "with_sizes",
]
