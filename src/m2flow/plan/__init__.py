"""The micro flow: plans, their files, their validation, and the builders of the fixed modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan
from m2flow.plan.builders import (
    BUILDERS,
    build_plan,
    collocated,
    disaggregated,
    eager,
    hybrid,
    placed,
)
from m2flow.plan.companion import companion
from m2flow.plan.describe import describe_plan
from m2flow.plan.file import plan_from_json, read_plan, to_json
from m2flow.plan.isolation import isolate, isolated_workers
from m2flow.plan.lanes import check_machine, parse_lanes, with_memory
from m2flow.plan.machine import available_cores
from m2flow.plan.memory import needs, with_sizes
from m2flow.plan.sizes import parse_bytes
from m2flow.plan.validate import validate

if TYPE_CHECKING:
    from m2flow.plan.search import Found, Limits, Problem, candidates, problem, to_plan

__all__ = [
    "BUILDERS",
    "EdgePlan",
    "Found",
    "LaneSpec",
    "Limits",
    "Placement",
    "Plan",
    "Problem",
    "StagePlan",
    "available_cores",
    "build_plan",
    "candidates",
    "check_machine",
    "collocated",
    "companion",
    "describe_plan",
    "disaggregated",
    "eager",
    "hybrid",
    "isolate",
    "isolated_workers",
    "needs",
    "parse_bytes",
    "parse_lanes",
    "placed",
    "plan_from_json",
    "problem",
    "read_plan",
    "to_json",
    "to_plan",
    "validate",
    "with_memory",
    "with_sizes",
]

SEARCHED = frozenset({"Found", "Limits", "Problem", "candidates", "problem", "to_plan"})


def __getattr__(name: str) -> Any:
    if name in SEARCHED:
        from m2flow.plan import search

        return getattr(search, name)
    raise AttributeError(f"module 'm2flow.plan' has no attribute {name!r}")
