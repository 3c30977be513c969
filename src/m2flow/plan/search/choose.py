"""`search`: the cheapest plan tree for each staleness, with what its seconds are made of.

The searches come in an order in which each one's best step is the bound of the next (`passes`).
`candidates` gives the best few plans that differ in more than a size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from m2flow.plan.search.different import differ, look
from m2flow.plan.search.enough import nothing_fits
from m2flow.plan.search.evaluate import evaluate
from m2flow.plan.search.frontier import State, paid
from m2flow.plan.search.passes import Passes
from m2flow.plan.search.pricing import Terms, step_seconds
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.tree import Cost, Tree
from m2flow.plan.search.weights import companions_seconds
from m2flow.plan.units import Seconds

NEAR = 0.15
"""A candidate takes at most so much longer than the best plan, as a share."""

LOOKED_AT = 3000
"""So many of the cheapest plans are compared with each other to find different ones."""


@dataclass(frozen=True)
class Found:
    """The best plan for one staleness, or one of the next best.

    Attributes:
        staleness: how many steps the weights that generate may lag behind.
        tree: the plan.
        seconds: of a step.
        terms: what they are made of, but for publishing.
        publishing: seconds of it.
        cost: of the tree's root.
        error: standard error of the seconds, relative, as far as it comes from the prices of the
            stages (`StageCost.error`).
    """

    staleness: int
    tree: Tree
    seconds: Seconds
    terms: Terms
    publishing: Seconds
    cost: Cost
    error: float = 0.0

    def ties_with(self, other: Found) -> bool:
        """Whether the profile is not sure enough to tell which of two plans is faster.

        Their errors are taken for independent; as both plans run the same stages, the truth is
        rather less than that.
        """
        apart = abs(self.seconds - other.seconds)
        return apart <= math.hypot(self.error * self.seconds, other.error * other.seconds)


def search(problem: Problem, max_staleness: int = 0) -> list[Found]:
    """The frontier of step time against staleness: the best plan for each, from 0 on.

    Args:
        problem: what is planned.
        max_staleness: the most steps that generation may run ahead; each more is kept in the
            answer only if it is faster than one less.

    Raises:
        UserError: no plan keeps the limits; says how many lanes would do.
    """
    return _frontier(problem, Passes(problem, max_staleness))


def candidates(problem: Problem, max_staleness: int = 0, keep: int = 6) -> list[Found]:
    """The best few plans that differ in where stages stand, what shares lanes, or by more than a
    neighbouring size in lanes or chunks.

    Args:
        problem: what is planned.
        max_staleness: as in `search`; for each the best plan is among the answers.
        keep: how many plans at most, beside those.

    Returns:
        By staleness from 0 on, and then cheapest first: the first is `search(problem)[0]`. None
        takes more than NEAR longer than the best one of its staleness.

    Raises:
        UserError: no plan keeps the limits.
    """
    passes = Passes(problem, max_staleness)
    answers: list[Found] = []
    for best in _frontier(problem, passes):
        kept, looks = [best], [look(problem, best.tree)]
        near = sorted(passes.near(best.staleness, NEAR), key=paid)
        for state in near[:LOOKED_AT]:
            if len(kept) >= keep:
                break
            seen = look(problem, state[1])
            if all(differ(problem, seen, other) for other in looks):
                looks.append(seen)
                finer = _found(problem, best.staleness, passes.refined(state))
                seen = look(problem, finer.tree)
                if all(differ(problem, seen, other) for other in looks[:-1]):
                    looks.append(seen)
                    kept.append(finer)
        answers += sorted(kept, key=lambda found: found.seconds)
    return answers


def _frontier(problem: Problem, passes: Passes) -> list[Found]:
    answers: list[Found] = []
    for staleness, state in enumerate(passes.best):
        if state is None or (answers and paid(state) >= paid((answers[-1].cost, None))):
            continue
        answers.append(_found(problem, staleness, state))
    if not answers or answers[0].staleness:
        raise nothing_fits(problem)
    return answers


def _found(problem: Problem, staleness: int, state: State) -> Found:
    priced = evaluate(problem, state[1])
    seconds = step_seconds(problem, priced.cost)
    assert abs(priced.cost.first - state[0].first) <= 1e-9 * max(1.0, seconds), (
        "the search and the price of its plan disagree"
    )
    return Found(
        staleness,
        state[1],
        Seconds(seconds),
        priced.first,
        Seconds(priced.cost.publishing + companions_seconds(problem)),
        priced.cost,
        priced.first_error / seconds if seconds else 0.0,
    )
