"""Publishing in a plan tree: which weight edges meet at a node, and what they take there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product

from m2flow.flow.graph import WeightEdge
from m2flow.plan.profile import PLACES
from m2flow.plan.search.problem import Problem

Layouts = Mapping[str, tuple[int, int]]
"""For some workers (lanes of a replica, kind)."""

Allowed = Mapping[str, Collection[tuple[int, int]]]
"""For some workers the layouts that they may have; a worker left out may have any."""


def edges_within(problem: Problem, part: int) -> list[WeightEdge]:
    """Weight edges both of whose workers have all their stages in a part of the tasks."""
    of = problem.tasks_of
    return [
        edge for edge in problem.weight_edges if not (of[edge.source] | of[edge.target]) & ~part
    ]


def meeting(problem: Problem, first: int, second: int) -> tuple[WeightEdge, ...]:
    """Weight edges whose ends come together where two parts do."""
    inner = edges_within(problem, first) + edges_within(problem, second)
    return tuple(edge for edge in edges_within(problem, first | second) if edge not in inner)


def fit_together(problem: Problem, edge: WeightEdge, layouts: Layouts) -> bool:
    """Whether, on common lanes, new weights fit beside those they replace."""
    source, target = layouts[edge.source], layouts[edge.target]
    if source[1] != target[1]:
        return True
    both = problem.state(edge.source, *source)[0] + problem.state(edge.target, *target)[0]
    return both <= 1


def seconds_of(problem: Problem, edge: WeightEdge, place: str, layouts: Layouts) -> float:
    """The price of an edge between workers of given layouts."""
    return problem.profile.publish_seconds(
        edge.source, edge.target, place, layouts[edge.source][0], layouts[edge.target][0]
    )


def least_seconds(problem: Problem, layouts: Layouts) -> float:
    """What all edges between workers of given layouts cost at least, wherever they stand."""
    return sum(
        min(seconds_of(problem, edge, place, layouts) for place in PLACES)
        for edge in problem.weight_edges
    )


def companions_seconds(problem: Problem) -> float:
    """Publishing to workers that have no stage in the step and stand beside their source."""
    return sum(
        problem.profile.publish_seconds(source, target, "same", 1, 1)
        for source, targets in problem.companions.items()
        for target in targets
    )


def priced_layouts(problem: Problem) -> Iterator[Allowed]:
    """Layouts of workers between which weights are published, where their price hangs on them.

    The price of publishing, or whether two states fit on one lane, may depend on the layouts of two
    workers; each combination of those is a search of its own. Layouts of a worker for which it all
    is the same are in one search.
    """
    ends = dict.fromkeys(w for edge in problem.weight_edges for w in (edge.source, edge.target))
    alike = {worker: _alike(problem, worker) for worker in ends}
    free = {worker: groups for worker, groups in alike.items() if len(groups) > 1}
    for choice in product(*free.values()):
        yield dict(zip(free, choice, strict=True))


def _alike(problem: Problem, worker: str) -> list[frozenset[tuple[int, int]]]:
    """A worker's layouts, those together with which all its weight edges cost and fit the same."""
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for mine in problem.worker_layouts(worker):
        found: list[object] = []
        for edge in problem.weight_edges:
            if worker not in (edge.source, edge.target):
                continue
            other = edge.target if edge.source == worker else edge.source
            for theirs in problem.worker_layouts(other):
                layouts = {worker: mine, other: theirs}
                found += [seconds_of(problem, edge, place, layouts) for place in PLACES]
                found.append(fit_together(problem, edge, layouts))
        groups.setdefault(tuple(found), []).append(mine)
    return [frozenset(group) for group in groups.values()]
