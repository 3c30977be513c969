"""The order of the searches: each one's best step is the bound of the next.

What runs in turn on all lanes comes first, then coarse searches of all structures on few sizes.
Around the plans they find (with the cuts of their trees) a finer one looks at more chunk sizes.
On up to FINE lanes a search of everything closes: its answer is the best there is. On up to CLOSES
it is the best on the grids of `menus`; on more, what the coarse searches led to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from m2flow.plan.search.cuts import Cuts, Structure, chunks_of, structure
from m2flow.plan.search.frontier import State, cheapest, paid
from m2flow.plan.search.leaf_states import LeafStates
from m2flow.plan.search.menus import FINE, HALVES, MAX_CHUNKS, counts, few, lean, none, thinned
from m2flow.plan.search.overlap import overlapped, overlapping
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.solve import Scope, Solver
from m2flow.plan.search.tree import Steps
from m2flow.plan.search.weights import priced_layouts

COARSE = 8
"""Above so many lanes times tasks a coarse search gives a bound first."""

BEAM = 2
"""States of a part that the coarse searches keep."""

WIDE_BEAM = 8
"""States that are kept where a narrower beam found nothing that fits."""

CLOSES = 128
"""Up to so many lanes a search of everything comes last. With a good bound it takes a second, but
not where cores or memory of machines are limits: far more states are undominated then."""

EFFORT = 40_000
"""It does on any number of lanes if there are at most about so many parts to look at."""


class Passes:
    """The best plan for each staleness.

    Args:
        problem: what is planned.
        max_staleness: the most steps that generation may run ahead.
    """

    def __init__(self, problem: Problem, max_staleness: int = 0) -> None:
        self.problem = problem
        self._wide: tuple[Scope, ...] = ()
        self._finer: dict[Scope, State] = {}
        self.best: list[State | None] = [None] * (max_staleness + 1)
        self._leaves = [LeafStates(problem, given) for given in priced_layouts(problem)]
        self._chunks = tuple(int(size) for size in problem.chunks)
        largest, finest = self._chunks[0], self._chunks[-1]
        middle = thinned(self._chunks, HALVES, MAX_CHUNKS)[-1]
        if sum(problem.lanes) * len(problem.tasks) > COARSE:
            self._run(Scope(_chain(largest, middle), none, BEAM))
        if sum(problem.lanes) <= FINE:
            if sum(problem.lanes) * len(problem.tasks) > COARSE:
                self._run(Scope(_chain(largest, middle), few, BEAM))
            self._wide = (Scope(self._chunks),)
            self._run(self._wide[0])
        else:
            upper = thinned(self._chunks, HALVES, MAX_CHUNKS // 2)[-1]
            self._many(Scope(_chain(largest, upper, finest), lean, 1))

    def _many(self, wide: Scope) -> None:
        """On more than FINE lanes, from a wide and coarse look on."""
        problem, before = self.problem, self.best
        self._run(wide)
        around = self._around([state for state in (*before, *self.best) if state])
        self._run(around)
        self._wide = (wide, around)
        if self.best[0] is None:  # what a narrow beam leaves out may be all that fits
            self._run(replace(wide, beam=WIDE_BEAM))
        if self.best[0] is None:
            return
        limits, lanes = problem.limits, sum(problem.lanes)
        scarce = limits.cores is not None or limits.host_bytes is not None
        if (lanes <= CLOSES and not scarce) or self._effort() * (1 + 3 * scarce) <= EFFORT:
            self._run(Scope(self._chunks))
        elif CLOSES < lanes <= 4 * CLOSES and len(problem.kinds) == 1 and not scarce:
            # It may not gain from more lanes than those on which everything is looked at.
            self._run(Scope(self._chunks), replace(problem, lanes=(CLOSES,)))

    def near(self, staleness: int, share: float) -> Iterator[State]:
        """Plans that take at most so much longer than the best one, as a share of it."""
        best = self.best[staleness]
        assert best is not None, "there is no plan of this staleness"
        most = paid(best) * (1 + share)
        for scope in self._wide:
            for leaves in self._leaves:
                solver = Solver(leaves, scope, most)
                roots = overlapping(solver, staleness + 1) if staleness else solver.roots()
                yield from (state for state in roots if paid(state) <= most)

    def refined(self, state: State) -> State:
        """The best plan around one, where a plan's sizes are coarse.

        What is around it is around many another one; the cheapest should be the first to be asked.
        """
        if sum(self.problem.lanes) <= FINE or isinstance(state[1], Steps):
            return state
        scope, most = self._around([state]), paid(state)
        if scope not in self._finer:
            finer = (Solver(leaves, scope, most).best() for leaves in self._leaves)
            self._finer[scope] = min([state, *(found for found in finer if found)], key=paid)
        return min(state, self._finer[scope], key=paid)

    def _around(self, states: list[State]) -> Scope:
        """All structures and chunk sizes that are near some plans."""
        only, sizes = Structure(), {self._chunks[0]}
        for _, tree in states:
            only |= structure(tree)
            sizes |= chunks_of(tree)
        near = (c for c in self._chunks if any(c <= 2 * n and n <= 2 * c for n in sizes))
        return Scope(tuple(near), lean, BEAM, only)

    def _effort(self) -> float:
        """Roughly how many parts a search of everything has to look at."""
        problem = self.problem
        cuts, known, ahead = Cuts(problem, counts), set[int](), {problem.everything}
        while ahead:
            part = ahead.pop()
            known.add(part)
            ahead |= {side for cut in cuts.of(part) for side in (cut.first, cut.second)} - known
        shared = [worker for worker, tasks in problem.tasks_of.items() if tasks & (tasks - 1)]
        bindings = sum(len(problem.worker_layouts(worker)) for worker in shared)
        ways = math.prod(len(counts(count)) for count in problem.lanes) * len(self._chunks)
        return len(known) * (1 + 2 * bindings) * ways * len(self._leaves)

    def _run(self, scope: Scope, fewer: Problem | None = None) -> None:
        """One search, perhaps with fewer lanes; what is better than what is known is kept."""
        best = list(self.best)
        for leaves in self._leaves:
            if fewer is not None:
                leaves = LeafStates(fewer, leaves.given)
            solver = Solver(leaves, scope, paid(best[0]) if best[0] else math.inf)
            found = [solver.best()]
            found += [overlapped(solver, parts) for parts in range(2, len(best) + 1)]
            best = [cheapest(s for s in pair if s) for pair in zip(best, found, strict=True)]
        self.best = best


def _chain(*sizes: int) -> tuple[int, ...]:
    return tuple(sorted(set(sizes), reverse=True))
