"""The search: Pareto states of all order ideals and lane counts, memoised, with a bound.

`Solver.front(part, lanes, R, m, bound)` is the set of costs that no other plan tree of the same
space undercuts in everything. It asks nothing of lane identities. The space, beyond what `tree`
says:

* chunk sizes are a chain of divisors, those of `Problem.chunks` or some of them;
* replicas of a stage: every number up to `FINE`, beyond it the smallest that leaves the busiest
  replica one of the unit counts in `grid`, and all that fit;
* replicas of a bound worker: the same, but where its node has more than `FINE` lanes, only the most
  that help it;
* lanes of either side of a `Spatial`: a number of a menu (`menus`; every one up to `FINE`). The
  second side gets the most of these that is left;
* the cuts of given trees, where only around those is searched.

A tree is dropped if no step with it can be faster than the best one known, less the least that
publishing takes. Every rule of `tree` only adds to a part's seconds, and while it has its lanes the
other stages need theirs (`area`). What a part takes at least is known beforehand (`floors`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from m2flow.plan.search.area import SLACK, Area
from m2flow.plan.search.bindings import Bindings
from m2flow.plan.search.combine import NOTHING, apart, in_turn, pipelined
from m2flow.plan.search.cuts import Cut, Cuts, Menu, Structure
from m2flow.plan.search.floors import Floors
from m2flow.plan.search.frontier import UNBOUND, Bounds, Front, State, cheapest, pareto, shortened
from m2flow.plan.search.leaf_states import LeafStates
from m2flow.plan.search.menus import counts
from m2flow.plan.search.problem import Lanes
from m2flow.plan.search.tree import Chunked, Cost, Spatial, Temporal
from m2flow.plan.search.weights import fit_together, least_seconds, seconds_of


@dataclass(frozen=True)
class Scope:
    """How thoroughly a search looks.

    Attributes:
        chunks: sizes that are tried, largest first; each divides the one before.
        menu: lanes that a side of a `Spatial` may have, of so many in all.
        beam: the most states that are kept of a part, with bound workers on as many lanes as can
            be; None for all states and bindings.
        only: the cuts that are tried; None for all.
    """

    chunks: tuple[int, ...]
    menu: Menu = counts
    beam: int | None = None
    only: Structure | None = None


class Solver:
    """One search with fixed layouts for some workers.

    Args:
        leaves: states of the leaves, which searches share.
        scope: how thoroughly it looks.
        most: seconds of a step beyond which nothing is of interest.
    """

    _keeps_periods = True

    def __init__(self, leaves: LeafStates, scope: Scope, most: float = math.inf) -> None:
        self.problem, self.leaves, self.scope = leaves.problem, leaves, scope
        self.most = most * (1 + 1e-12)
        self.cuts = Cuts(self.problem, scope.menu, scope.only)
        self._finer = dict(zip(scope.chunks, scope.chunks[1:], strict=False))
        self._step = int(self.problem.num_items)
        self._fronts: dict[tuple[int, Lanes, int, int, Bounds], Front] = {}
        self._turns: dict[tuple[int, Lanes, int, Bounds], Front] = {}
        self._published: dict[tuple[int, int, str], float] = {}
        tasks = self.problem.tasks
        self._streaming = sum(1 << n for n, task in enumerate(tasks) if task.streaming)
        bounded = range(len(tasks)) if math.isfinite(self.most) else ()
        works = [leaves.least_works(n, scope.chunks) for n in bounded]
        left = self.most - least_seconds(self.problem, leaves.layouts)
        self._area = Area(self.problem.lanes, works, left)
        self._floors = Floors(leaves, scope.chunks, self._area, self.cuts)
        self._bindings = Bindings(leaves, scope.chunks, self._area, scope.beam is None, self.front)

    def best(self) -> State | None:
        """The cheapest plan of a step in which one part does not overtake another."""
        step = self._step
        return cheapest(self.front(self.problem.everything, self.problem.lanes, step, step))

    def roots(self) -> Iterator[State]:
        """Plans of a step: with each chunk size and cut at the root the undominated parts, none
        left out for being worse than a plan with another root."""
        whole, lanes, step = self.problem.everything, self.problem.lanes, self._step
        if not whole & (whole - 1):
            yield from self.front(whole, lanes, step, step)
        for chunk in self.scope.chunks:
            for cut in self.cuts.of(whole):
                found: Iterable[State] = ()
                if cut.in_turn:
                    found = self._temporal(cut, lanes, chunk, UNBOUND)
                if cut.apart:
                    found = chain(found, self._spatial(cut, lanes, step, chunk))
                for state in self._kept(found, whole, lanes, step, chunk):
                    yield state if chunk == step else _as_chunk(state, step // chunk, chunk)

    # Fronts

    def front(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds = UNBOUND
    ) -> Front:
        """Undominated states of a part; at R = m their period is 0, as nobody asks for it."""
        usable = self.cuts.usable(part)
        if False in usable:
            lanes = tuple(n if use else 0 for n, use in zip(lanes, usable, strict=True))
        if chunk < round_size and not part & self._streaming:
            round_size = self._step
        key = (part, lanes, round_size, chunk, bound)
        found = self._fronts.get(key)
        if found is None:
            found = self._fronts[key] = self._new_front(*key)
        return found

    def _new_front(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> Front:
        if self._too_slow(part, lanes, round_size, chunk):
            return []
        if not part & (part - 1):
            states = self.leaves.front(part.bit_length() - 1, lanes, round_size, chunk, bound)
            found = list(self._kept(states, part, lanes, round_size, chunk))
        elif (
            chunk == round_size < self._step and not part & self._streaming and self._keeps_periods
        ):  # the period is never more than the first chunk, so that all of these are there
            longer = self.front(part, lanes, self._step, chunk, bound)
            found = pareto(self._kept(longer, part, lanes, round_size, chunk))
        else:
            composed = self._composed(part, lanes, round_size, chunk, bound)
            found = pareto(self._kept(composed, part, lanes, round_size, chunk))
        if self.scope.beam is not None:
            return shortened(found, self.scope.beam, round_size // chunk)
        return found

    def _in_chunks(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> Front:
        """What a `Chunked` node may have inside."""
        return self.front(part, lanes, round_size, chunk, bound)

    def _most_seconds(self, part: int, lanes: Lanes, round_size: int) -> float:
        """Seconds of a round beyond which a part is of no use."""
        return self._area.most_seconds(part, lanes) * round_size / self._step * SLACK

    def _too_slow(self, part: int, lanes: Lanes, round_size: int, chunk: int) -> bool:
        """Whether a part takes longer than is of use, however it is carried out."""
        least = self._floor(part, lanes, round_size, chunk)
        return least > self._most_seconds(part, lanes, round_size)

    def _floor(self, part: int, lanes: Lanes, round_size: int, chunk: int) -> float:
        """Seconds that a round of a part takes at least; nobody asks where anything will do."""
        if math.isinf(self.most):
            return 0.0
        return self._floors.seconds(part, lanes, round_size, chunk) * round_size / self._step

    def _kept(
        self,
        states: Iterable[State],
        part: int,
        lanes: Lanes,
        round_size: int,
        chunk: int,
        periods: bool = False,
    ) -> Iterator[State]:
        """States that keep the limits and may be part of the best plan."""
        limits, most = self.problem.limits, self._most_seconds(part, lanes, round_size)
        more, whole = round_size // chunk - 1, round_size == chunk and not periods
        cores, host = limits.cores, limits.host_bytes
        for cost, tree in states:
            if cost[3] > 1 or cost[0] + more * cost[1] > most or cost[0] + cost[5] > self.most:
                continue
            if cores is not None and cost.cores > cores:
                continue
            if host is not None and cost.host > host:
                continue
            if whole and cost[1]:
                cost = Cost(cost[0], 0.0, *cost[2:])
            yield cost, tree

    def _composed(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> Iterator[State]:
        yield from self._in_turn(part, lanes, chunk, bound)
        for cut in self.cuts.of(part):
            if cut.apart and not bound:
                yield from self._spatial(cut, lanes, round_size, chunk)
        finer = self._finer.get(
            chunk
        )  # last, so that of equal plans the one of larger chunks stays
        if finer is not None:
            for state in self._in_chunks(part, lanes, round_size, finer, bound):
                yield _as_chunk(state, chunk // finer, finer)

    def _in_turn(self, part: int, lanes: Lanes, chunk: int, bound: Bounds) -> Front:
        """Undominated states of a part whose root is `Temporal`; the round does not matter."""
        key = (part, lanes, chunk, bound)
        if key not in self._turns:
            states = (
                state
                for cut in self.cuts.of(part)
                if cut.in_turn
                for state in self._temporal(cut, lanes, chunk, bound)
            )
            # Asked for a whole round, such a state is as good as it is within a longer one.
            self._turns[key] = pareto(self._kept(states, part, lanes, chunk, chunk, True))
        return self._turns[key]

    def _temporal(self, cut: Cut, lanes: Lanes, chunk: int, bound: Bounds) -> Iterator[State]:
        layouts, part = self.leaves.layouts, cut.first | cut.second
        if not all(fit_together(self.problem, edge, layouts) for edge in cut.edges):
            return
        known = {where.worker for where in bound}
        fresh = [worker for worker in cut.shared if worker not in known]
        publishing = self.publishing(cut, "same")
        most = self._most_seconds(part, lanes, chunk)
        after = self._floor(cut.second, lanes, chunk, chunk)
        if self._floor(cut.first, lanes, chunk, chunk) + after > most:
            return
        for binding in self._bindings.of(fresh, part, lanes, chunk, most):
            within = bound.union(binding) if binding else bound
            left = self.front(cut.first, lanes, chunk, chunk, self._seen(within, cut.first))
            if not left or left[0][0][0] + after > most:
                continue
            right = self.front(cut.second, lanes, chunk, chunk, self._seen(within, cut.second))
            held = self._bindings.held(binding) if binding else NOTHING
            room = 1 - held.resident
            for x, a in left:
                for y, b in right:
                    if x[0] + y[0] > most:
                        break  # they are in order of their seconds
                    if x[3] + y[2] <= room and x[2] + y[3] <= room:
                        yield in_turn(x, y, publishing, False, held), Temporal(a, b, False, binding)
                    if self.leaves.limited and (x[2] or y[2]) and x[0] + y[0] + x[4] + y[4] <= most:
                        yield in_turn(x, y, publishing, True, held), Temporal(a, b, True, binding)

    def _seen(self, bound: Bounds, part: int) -> Bounds:
        return self._bindings.seen(bound, part)

    def _spatial(self, cut: Cut, lanes: Lanes, round_size: int, chunk: int) -> Iterator[State]:
        more = round_size // chunk - 1
        most = self._most_seconds(cut.first | cut.second, lanes, round_size)
        charged = bool(cut.size and self.problem.profile.links)
        before: tuple[list[Cost], str] | None = None
        for mine, other in self.cuts.splits(cut, lanes):
            after = self._floor(cut.second, other, round_size, chunk)
            if max(self._floor(cut.first, mine, round_size, chunk), after) > most:
                continue
            left = self.front(cut.first, mine, round_size, chunk)
            if not left or (cut.joined and left[0][0][0] + after > most):
                continue
            totals = sum(mine), sum(other)
            place = self.problem.place(sum(totals))
            same = ([cost for cost, _ in left], place)
            if same == before and not charged:
                continue  # the first part gains nothing from more lanes, the second has fewer
            right = self.front(cut.second, other, round_size, chunk)
            if not right:
                continue
            publishing = self.publishing(cut, place)
            link = self.problem.link_seconds(cut.size * chunk, *totals) if charged else 0.0
            for x, a in left:
                for y, b in right:
                    first, period = pipelined(x, y, cut.joined, link)
                    if first + more * period <= most:
                        yield apart(x, y, first, period, publishing), Spatial(a, b, mine, other)
            before = same if len(lanes) == 1 else None

    def publishing(self, cut: Cut, place: str) -> float:
        """Seconds of the weight edges that meet at a cut."""
        key = (cut.first, cut.second, place)
        if key not in self._published:
            self._published[key] = sum(
                seconds_of(self.problem, edge, place, self.leaves.layouts) for edge in cut.edges
            )
        return self._published[key]


def _as_chunk(state: State, count: int, chunk: int) -> State:
    """So many smaller chunks as one."""
    cost, tree = state
    first, period = cost.first + (count - 1) * cost.period, count * cost.period
    inner = tree if isinstance(tree, Chunked) else Chunked(tree, chunk)
    return Cost(first, period, *cost[2:]), inner
