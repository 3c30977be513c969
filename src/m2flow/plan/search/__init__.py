"""The search for the plan of a step: of all plan trees (`tree`) the cheapest.

`search` gives it for each staleness that is allowed; `to_plan` makes it an engine's `Plan`.
"""

from m2flow.plan.search.baseline import scalar_recursion
from m2flow.plan.search.choose import Found, search
from m2flow.plan.search.evaluate import Infeasible, Terms, evaluate
from m2flow.plan.search.placing import to_plan
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
    "evaluate",
    "problem",
    "scalar_recursion",
    "search",
    "to_plan",
]
