"""Plans in which parts of the flow are at work on different steps, as staleness allows."""

from __future__ import annotations

from collections.abc import Iterator

from m2flow.plan.search.combine import apart
from m2flow.plan.search.frontier import State, cheapest, pareto
from m2flow.plan.search.problem import Lanes
from m2flow.plan.search.solve import Solver
from m2flow.plan.search.tree import Cost, Steps, Tree

Parts = tuple[tuple[Tree, ...], tuple[Lanes, ...]]


def overlapped(solver: Solver, parts: int) -> State | None:
    """The cheapest plan in which at most so many parts are at work on different steps."""
    problem = solver.problem
    found = _fronts(solver, problem.everything, problem.lanes, parts)
    return cheapest(
        (cost, trees[0] if len(trees) == 1 else Steps(trees, lanes))
        for cost, (trees, lanes) in found
    )


def overlapping(solver: Solver, parts: int) -> Iterator[State]:
    """Plans with two to so many parts at work on different steps."""
    problem = solver.problem
    for cost, (trees, lanes) in _cut(solver, problem.everything, problem.lanes, parts):
        yield cost, Steps(trees, lanes)


def _fronts(solver: Solver, part: int, lanes: Lanes, parts: int) -> list[tuple[Cost, Parts]]:
    """Undominated states of at most so many parts."""
    step = int(solver.problem.num_items)
    whole = [(cost, ((tree,), (lanes,))) for cost, tree in solver.front(part, lanes, step, step)]
    return pareto([*whole, *_cut(solver, part, lanes, parts)])


def _cut(solver: Solver, part: int, lanes: Lanes, parts: int) -> Iterator[tuple[Cost, Parts]]:
    """A first part on lanes of its own, and the undominated states of what comes after it."""
    problem = solver.problem
    step, place = int(problem.num_items), problem.place(sum(problem.lanes))
    for cut in solver.cuts.of(part) if parts > 1 else ():
        if not cut.apart:
            continue
        publishing = solver.publishing(cut, place)
        for mine, other in solver.cuts.splits(cut, lanes):
            left = solver.front(cut.first, mine, step, step)
            if not left or not any(other):
                continue
            link = problem.link_seconds(cut.size * step, sum(mine), sum(other))
            for y, (trees, spots) in _fronts(solver, cut.second, other, parts - 1):
                for x, tree in left:
                    cost = apart(x, y, max(x.first, y.first, link), 0.0, publishing)
                    yield cost, ((tree, *trees), (mine, *spots))
