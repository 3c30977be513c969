"""`search`: the cheapest plan tree for each staleness, with what its seconds are made of.

A search of what runs in turn on all lanes comes first, then one on few chunk sizes and lane counts;
the best step of each is the bound of the next. Where the price of publishing, or whether two states
fit on one lane, depends on the layouts of two workers, each pair is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from m2flow.errors import UserError
from m2flow.plan.search.evaluate import Terms, companions_seconds, evaluate, step_seconds
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.solve import Layouts, Solver, State, counts
from m2flow.plan.search.tree import Cost, Tree
from m2flow.plan.units import Seconds

COARSE = 8
"""Above so many lanes times tasks a coarse search gives a bound first."""

BEAM = 2
"""States of a part that the coarse search keeps."""


@dataclass(frozen=True)
class Found:
    """The best plan for one staleness.

    Attributes:
        staleness: how many steps the weights that generate may lag behind.
        tree: the plan.
        seconds: of a step.
        terms: what they are made of, but for publishing.
        publishing: seconds of it.
        cost: of the tree's root.
    """

    staleness: int
    tree: Tree
    seconds: Seconds
    terms: Terms
    publishing: Seconds
    cost: Cost


def search(problem: Problem, max_staleness: int = 0) -> list[Found]:
    """The frontier of step time against staleness: the best plan for each, from 0 on.

    Args:
        problem: what is planned.
        max_staleness: the most steps that generation may run ahead; each more is kept in the
            answer only if it is faster than one less.

    Raises:
        UserError: no plan keeps the limits.
    """
    best: list[State | None] = [None] * (max_staleness + 1)
    most = math.inf
    coarse = sum(problem.lanes) * len(problem.tasks) > COARSE
    for rough in (2, 1, 0) if coarse else (0,):
        for layouts in _layouts(problem):
            found = _solve(problem, layouts, most, rough, max_staleness)
            for n, state in enumerate(found):
                known = best[n]
                if state is not None and (known is None or _paid(state) < _paid(known)):
                    best[n] = state
            if best[0] is not None:
                most = _paid(best[0])
    if best[0] is None:
        raise UserError(
            "no plan keeps the limits of these lanes",
            key="lanes",
            value=dict(zip(problem.kinds, problem.lanes, strict=True)),
            hint="more lanes, more memory for each, or layouts over several lanes",
        )
    answers: list[Found] = []
    for staleness, state in enumerate(best):
        if state is None or (answers and _paid(state) >= _paid((answers[-1].cost, state[1]))):
            continue
        priced = evaluate(problem, state[1])
        seconds = step_seconds(problem, priced.cost)
        publishing = priced.cost.publishing + companions_seconds(problem)
        assert abs(priced.cost.first - state[0].first) <= 1e-9 * max(1.0, seconds), (
            "the search and the price of its plan disagree"
        )
        answers.append(
            Found(
                staleness,
                state[1],
                Seconds(seconds),
                priced.first,
                Seconds(publishing),
                priced.cost,
            )
        )
    return answers


def _solve(
    problem: Problem, layouts: Layouts, most: float, rough: int, max_staleness: int
) -> list[State | None]:
    if rough:
        chunks = tuple(int(size) for size in problem.chunks)
        some = tuple(dict.fromkeys((chunks[0], chunks[-1])))
        menu = _few if rough == 1 else _none
        solver = Solver(problem, layouts, most, some, menu, BEAM)
    else:
        solver = Solver(problem, layouts, most)
    found = [solver.best()]
    return found + [solver.overlapped(parts + 1) for parts in range(1, max_staleness + 1)]


def _none(most: int) -> tuple[int, ...]:
    """All on one side."""
    return (0, most)


def _few(most: int) -> tuple[int, ...]:
    """Powers of two from either end."""
    powers = [2**n for n in range(most.bit_length())]
    near = {n for n in powers if 4 * n >= most} | {1}
    menu = {0, most, *near, *(most - n for n in near)}
    return tuple(sorted(n for n in menu if n in counts(most)))


def _layouts(problem: Problem) -> Iterator[Layouts]:
    """Layouts of workers between which weights are published, where their price hangs on them."""
    free: dict[str, tuple[tuple[int, int], ...]] = {}
    for edge in problem.weight_edges:
        ends = (edge.source, edge.target)
        prices = {
            (place, problem.profile.publish_seconds(*ends, place, source, target))
            for place in ("same", "node", "cluster")
            for source, _ in problem.worker_layouts(edge.source)
            for target, _ in problem.worker_layouts(edge.target)
        }
        together = max(
            problem.state(edge.source, *source)[0] + problem.state(edge.target, *target)[0]
            for source in problem.worker_layouts(edge.source)
            for target in problem.worker_layouts(edge.target)
        )
        if together > 1 or len(prices) > len({place for place, _ in prices}):
            free |= {worker: problem.worker_layouts(worker) for worker in ends}
    for choice in product(*free.values()):
        yield dict(zip(free, choice, strict=True))


def _paid(state: State) -> float:
    return state[0].first + state[0].publishing
