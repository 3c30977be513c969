"""The micro flow: plans, their files, their validation, and the builders of the fixed modes."""

from __future__ import annotations

from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan
from m2flow.plan.builders import BUILDERS, build_plan, placed
from m2flow.plan.companion import companion
from m2flow.plan.describe import describe_plan
from m2flow.plan.file import plan_from_json, read_plan, to_json
from m2flow.plan.isolation import isolate, isolated_workers
from m2flow.plan.lanes import check_machine, parse_lanes, with_memory
from m2flow.plan.machine import available_cores
from m2flow.plan.memory import needs, with_sizes
from m2flow.plan.sizes import parse_bytes
from m2flow.plan.validate import validate

__all__ = [
    "BUILDERS",
    "EdgePlan",
    "LaneSpec",
    "Placement",
    "Plan",
    "StagePlan",
    "available_cores",
    "build_plan",
    "check_machine",
    "companion",
    "describe_plan",
    "isolate",
    "isolated_workers",
    "needs",
    "parse_bytes",
    "parse_lanes",
    "placed",
    "plan_from_json",
    "read_plan",
    "to_json",
    "validate",
    "with_memory",
    "with_sizes",
]
