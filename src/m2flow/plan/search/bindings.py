"""Where a worker may stand whose stages fall to both sides of a node on common lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

from m2flow.plan.search.area import Area
from m2flow.plan.search.combine import Held
from m2flow.plan.search.frontier import Bounds, Front
from m2flow.plan.search.leaf_states import LeafStates
from m2flow.plan.search.leaves import units
from m2flow.plan.search.menus import FINE, replica_counts
from m2flow.plan.search.problem import Lanes
from m2flow.plan.search.tree import Bound

Ask = Callable[[int, Lanes, int, int, Bounds], Front]


class Bindings:
    """The bindings that may be part of the best plan.

    Args:
        states: of the leaves.
        chunks: chunk sizes that are tried.
        area: what parts take at least.
        every: whether all numbers of replicas are tried on FINE lanes and fewer; else, and on more,
            only the most that help a worker.
        front: the search's states of a part.
    """

    def __init__(
        self,
        states: LeafStates,
        chunks: tuple[int, ...],
        area: Area,
        every: bool,
        front: Ask,
    ) -> None:
        self.problem, self.given = states.problem, states.given
        self._limited, self._chunks, self._area = states.limited, chunks, area
        self._every, self._front = every, front
        self._useful: dict[tuple[str, int, Lanes, int], list[Bound]] = {}

    def of(
        self, workers: list[str], part: int, lanes: Lanes, chunk: int, most: float
    ) -> Iterator[tuple[Bound, ...]]:
        """Each way to bind some workers.

        Args:
            workers: those that stand on both sides.
            part: the node's tasks.
            lanes: its lanes.
            chunk: its chunk.
            most: seconds of a chunk beyond which the part is of no use.
        """
        return product(*(self._options(worker, part, lanes, chunk, most) for worker in workers))

    def held(self, binding: tuple[Bound, ...]) -> Held:
        """What a node counts once for the workers it binds."""
        share, swap, size = 0.0, 0.0, 0.0
        for where in binding:
            if where.held:
                one = self.problem.state(where.worker, where.lanes, where.kind)
                share, swap = share + one[0], swap + (one[1] if self._limited else 0.0)
                size += one[2] * where.replicas * where.lanes
        return Held(share, swap, size if self.problem.limits.host_bytes is not None else 0.0)

    def seen(self, bound: Bounds, part: int) -> Bounds:
        """Of the bindings those that concern a part."""
        of = self.problem.tasks_of
        return frozenset(where for where in bound if of[where.worker] & part) if bound else bound

    def _options(
        self, worker: str, part: int, lanes: Lanes, chunk: int, most: float
    ) -> list[Bound]:
        """Bindings with which the part may be fast enough.

        While a bound stage runs, nothing else does on the node's lanes, so that its seconds add to
        what the other stages of the part need at least.
        """
        key = (worker, part, lanes, chunk)
        if key not in self._useful:
            tasks = self.problem.tasks_of[worker] & part
            rest = self._area.least_seconds(part & ~tasks, lanes)
            rest *= chunk / int(self.problem.num_items)
            self._useful[key] = [
                where
                for where in self._places(worker, lanes, chunk)
                if self._least_seconds(where, tasks, lanes, chunk) + rest <= most
            ]
        return self._useful[key]

    def _places(self, worker: str, lanes: Lanes, chunk: int) -> list[Bound]:
        """Layouts and replicas in which a worker may be bound."""
        problem = self.problem
        nodes = [n for task in problem.tasks for n in task.nodes if n.worker == worker]
        given = self.given.get(worker)
        every = self._every and sum(lanes) <= FINE
        modes = (True, False) if self._limited else (True,)
        found = []
        for gang, kind in problem.worker_layouts(worker):
            if given is not None and (gang, kind) not in given:
                continue
            numbers: set[int] = set()
            for node in nodes:
                window = int(problem.num_items) // node.minibatches
                count = units(node, chunk if node.streaming else min(chunk, window))[0]
                numbers.update(replica_counts(count, lanes[kind] // gang))
            found += [
                Bound(worker, gang, kind, count, held)
                for count in (sorted(numbers) if every else sorted(numbers)[-1:])
                for held in modes
            ]
        return found

    def _least_seconds(self, where: Bound, tasks: int, lanes: Lanes, chunk: int) -> float:
        """The least seconds of a bound worker's stages for a chunk, in whatever pieces."""
        total, within = 0.0, frozenset((where,))
        for n in range(len(self.problem.tasks)):
            if tasks >> n & 1 and not self.problem.tasks[n].streaming:
                fronts = (
                    (chunk // size, self._front(1 << n, lanes, size, size, within))
                    for size in self._chunks
                    if size <= chunk
                )
                total += min((count * f[0][0].first for count, f in fronts if f), default=math.inf)
        return total
