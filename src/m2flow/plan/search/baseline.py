"""The recursion of the paper, as a baseline: one plan for each part, lane count and item count.

RLinf (arXiv 2509.15965): the best of `T_s + T_t` and the switch, in turn on all lanes, and of
`T_critical + (M/m - 1) T_bottleneck`, on disjoint lanes in chunks of m. A part stands there with
the seconds of its fastest plan for m items, as its way to the first chunk and as its period alike:
that another plan of it, slower alone, has the shorter period is lost. The plan that comes of it is
then priced like any other.
"""

from __future__ import annotations

import math

from m2flow.plan.search.evaluate import evaluate
from m2flow.plan.search.frontier import UNBOUND, Bounds, Front
from m2flow.plan.search.leaf_states import LeafStates
from m2flow.plan.search.problem import Lanes, Problem
from m2flow.plan.search.solve import Scope, Solver


class _Scalar(Solver):
    """The search with one number of seconds where it keeps a set of states."""

    _keeps_periods = False

    def front(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds = UNBOUND
    ) -> Front:
        states = super().front(part, lanes, chunk, chunk, bound)
        if not states:
            return []
        cost, tree = min(states, key=lambda state: state[0].first)
        return [(cost._replace(period=cost.first), tree)]

    def _in_chunks(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> Front:
        return super().front(part, lanes, round_size, chunk, bound)


def scalar_recursion(problem: Problem) -> float:
    """Seconds of the plan that the recursion settles for, without companions; infinite if none."""
    chunks = tuple(int(size) for size in problem.chunks)
    found = _Scalar(LeafStates(problem, {}), Scope(chunks)).best()
    if found is None:
        return math.inf
    cost = evaluate(problem, found[1]).cost
    return cost.first + cost.publishing
