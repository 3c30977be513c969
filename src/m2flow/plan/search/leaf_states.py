"""Undominated states of leaves, found once for all searches of a problem with the same layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from m2flow.plan.search.area import Work, least_works
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
        self._works: dict[tuple[int, int, int], tuple[Work, ...]] = {}

    def front(
        self, index: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> list[State]:
        """A task's states. What nothing limits is not counted; nobody asks for the period of a
        round of one chunk."""
        key = (index, lanes, round_size, chunk, bound)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = pareto(self._on(*key))
        return found

    def _on(
        self, index: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> Iterable[State]:
        """States on such lanes; a stage stands on those of one kind."""
        kinds = [kind for kind, count in enumerate(lanes) if count]
        if len(kinds) < 2 or self.problem.tasks[index].is_loop:
            return self._priced(index, lanes, round_size, chunk, bound)
        alone = (tuple(n * (k == kind) for k, n in enumerate(lanes)) for kind in kinds)
        return [
            state for own in alone for state in self.front(index, own, round_size, chunk, bound)
        ]

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

    def least_works(self, index: int, chunks: tuple[int, ...]) -> tuple[Work, ...]:
        """The least products of lanes and seconds with which a task's part of a step is done."""
        streaming = self.problem.tasks[index].streaming
        return least_works(
            work
            for chunk in chunks
            for round_size in (chunks if streaming else (chunk,))
            if round_size >= chunk
            for work in self._least(index, round_size, chunk)
        )

    def _least(self, index: int, round_size: int, chunk: int) -> tuple[Work, ...]:
        """The same in rounds and chunks of one size."""
        key = (index, round_size, chunk)
        if key not in self._works:
            self._works[key] = least_works(self._every_work(index, round_size, chunk))
        return self._works[key]

    def _every_work(self, index: int, round_size: int, chunk: int) -> Iterator[Work]:
        problem = self.problem
        options = leaf_options(problem, self.given, index, problem.lanes, round_size, chunk, {})
        for leaf in options:
            cost = self._price(leaf, round_size, chunk, NOBODY)
            if cost is not None and cost.peak <= 1:
                seconds = cost.first + (round_size // chunk - 1) * cost.period
                seconds *= int(problem.num_items) / round_size
                yield tuple(count * seconds for count in lanes_of(problem, leaf))
