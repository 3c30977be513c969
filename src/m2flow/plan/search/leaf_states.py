"""Undominated states of leaves, found once for all searches of a problem with the same layouts."""

from __future__ import annotations

import math

from m2flow.plan.search.frontier import Bounds, State, pareto
from m2flow.plan.search.leaves import NOBODY, leaf_cost
from m2flow.plan.search.options import AnyLeaf, lanes_of, leaf_options
from m2flow.plan.search.problem import Lanes, Problem
from m2flow.plan.search.tree import Cost
from m2flow.plan.search.weights import Allowed, edges_within, seconds_of


class LeafStates:
    """The states of each task, by lanes, round, chunk and bindings.

    Args:
        problem: what is searched.
        given: layouts that some workers are kept to, between which publishing is alike.
    """

    def __init__(self, problem: Problem, given: Allowed) -> None:
        self.problem, self.given = problem, given
        standing = {worker: problem.worker_layouts(worker) for worker in problem.tasks_of}
        self.layouts = {worker: known[0] for worker, known in standing.items() if known}
        self.layouts |= {worker: min(allowed) for worker, allowed in given.items()}
        self.limited = any(size is not None for size in problem.memory)
        self._states: dict[tuple[int, Lanes, int, int, Bounds], list[State]] = {}
        self._prices: dict[tuple[AnyLeaf, int, int, frozenset[str]], Cost | None] = {}
        self._work: dict[tuple[int, tuple[int, ...]], float] = {}

    def front(
        self, index: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> list[State]:
        """A task's states. What nothing limits is not counted; nobody asks for the period of a
        round of one chunk."""
        key = (index, lanes, round_size, chunk, bound)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = pareto(self._priced(*key))
        return found

    def _priced(
        self, index: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> list[State]:
        problem, limits = self.problem, self.problem.limits
        states: list[State] = []
        held = frozenset(where.worker for where in bound if where.held)
        places = {where.worker: where for where in bound}
        paid = sum(
            seconds_of(problem, edge, "same", self.layouts)
            for edge in edges_within(problem, 1 << index)
        )
        hosted = limits.host_bytes is not None
        for leaf in leaf_options(problem, self.given, index, lanes, round_size, chunk, places):
            cost = self._price(leaf, round_size, chunk, held)
            if cost is None or cost.peak > 1:
                continue
            counted = Cost(
                cost.first,
                0.0 if round_size == chunk else cost.period,
                cost.resident,
                cost.peak,
                cost.swap if self.limited else 0.0,
                paid,
                cost.cores if limits.cores is not None else 0.0,
                cost.host if hosted else 0.0,
                cost.states if hosted else 0.0,
            )
            states.append((counted, leaf))
        return states

    def _price(
        self, leaf: AnyLeaf, round_size: int, chunk: int, held: frozenset[str]
    ) -> Cost | None:
        key = (leaf, round_size, chunk, held)
        if key not in self._prices:
            self._prices[key] = leaf_cost(self.problem, *key)
        return self._prices[key]

    def least_work(self, index: int, chunks: tuple[int, ...]) -> float:
        """The least product of lanes and seconds with which a task's part of a step is done."""
        key = (index, chunks)
        if key not in self._work:
            least = min(
                (
                    self._least(index, round_size, chunk)
                    for chunk in chunks
                    for round_size in (chunks if self.problem.tasks[index].streaming else (chunk,))
                    if round_size >= chunk
                ),
                default=math.inf,
            )
            self._work[key] = 0.0 if math.isinf(least) else least
        return self._work[key]

    def _least(self, index: int, round_size: int, chunk: int) -> float:
        """The same in rounds and chunks of one size."""
        problem, least = self.problem, math.inf
        options = leaf_options(problem, self.given, index, problem.lanes, round_size, chunk, {})
        for leaf in options:
            cost = self._price(leaf, round_size, chunk, NOBODY)
            if cost is not None:
                seconds = cost.first + (round_size // chunk - 1) * cost.period
                least = min(least, lanes_of(problem, leaf) * seconds)
        return least * int(problem.num_items) / round_size
