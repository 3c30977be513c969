"""Problems with chosen prices, and the seconds of the best plan of one."""

from __future__ import annotations

import math
from random import Random

from m2flow.errors import UserError
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile, WorkerCost
from m2flow.plan.search import Problem, problem, search
from m2flow.plan.units import Bytes, Seconds
from tests.plan.search.random_cases import Plain, build


def seconds(problem: Problem, max_staleness: int = 0) -> float:
    """The search's answer without companions; infinite where no plan fits."""
    try:
        found = search(problem, max_staleness)[-1]
    except UserError:
        return math.inf
    return found.cost.first + found.cost.publishing


def chain(rng: Random, lanes: int, num_items: int, limited: bool) -> Problem:
    """Three stages whose states do not fit on one lane together, or without any limit."""
    graph = build("chain3", (Plain,) * 3)
    stages, workers = {}, {}
    for node in graph.nodes:
        least, each = rng.uniform(0, 0.2), rng.uniform(0.1, 1)
        price = Piecewise(((1, least + each), (64, least + 64 * each)))
        stages[node.name] = StageProfile((StageCost(1, price),))
        moves = Seconds(rng.uniform(0, 2)), Seconds(rng.uniform(0, 2))
        workers[node.worker] = (WorkerCost(1, Bytes(60), *moves),)
    memory = {"cpu": 100} if limited else None
    profile = Profile(stages, workers)
    return problem(graph, profile, {"cpu": lanes}, num_items, memory=memory)


def line(first: float, each: float) -> Piecewise:
    """The price of one item, and of each further one."""
    return Piecewise(((1, first), (64, first + 63 * each)))


def priced(first: float, each: float, error: float = 0.0) -> StageProfile:
    """A stage by the price of one item and of each further one."""
    return StageProfile((StageCost(1, line(first, each), error=error),))
