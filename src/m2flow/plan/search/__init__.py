"""The search for the plan of a step: of all plan trees (`tree`) the cheapest.

`search` gives it for each staleness that is allowed, `candidates` the next best different ones too;
`to_plan` makes one an engine's `Plan`.
"""

from m2flow.plan.search.baseline import scalar_recursion
from m2flow.plan.search.choose import Found, candidates, search
from m2flow.plan.search.evaluate import evaluate
from m2flow.plan.search.placing import to_plan
from m2flow.plan.search.pricing import Infeasible, Terms, step_seconds
from m2flow.plan.search.problem import Limits, Problem, problem
from m2flow.plan.search.tree import (
    Bound,
    Chunked,
    Cost,
    Fused,
    Leaf,
    Spatial,
    Split,
    Steps,
    Temporal,
    Tree,
)

__all__ = [
    "Bound",
    "Chunked",
    "Cost",
    "Found",
    "Fused",
    "Infeasible",
    "Leaf",
    "Limits",
    "Problem",
    "Spatial",
    "Split",
    "Steps",
    "Temporal",
    "Terms",
    "Tree",
    "candidates",
    "evaluate",
    "problem",
    "scalar_recursion",
    "search",
    "step_seconds",
    "to_plan",
]
