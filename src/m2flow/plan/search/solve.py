"""The search: Pareto states of all order ideals and lane counts, memoised, with a bound.

`Solver.front(part, lanes, R, m, bound)` is the set of costs that no other plan tree of the same
space undercuts in everything. It asks nothing of lane identities. The space, beyond what `tree`
says:

* chunk sizes are those of `Problem.chunks`, a chain of divisors;
* replicas of a stage: every number up to `FINE`, beyond it the smallest that leaves the busiest
  replica one of the unit counts in `grid`, and all that fit;
* replicas of a bound worker: the same, but where its node has more than `FINE` lanes, only the most
  that help it;
* lanes of either side of a `Spatial`: a number of `grid` (every one up to `FINE`, those of two
  significant bits beyond), or all lanes of the problem less a power of two. The second side gets
  the most of these that is left.

A tree is dropped if no step with it can be faster than the best one known, whose T seconds on N
lanes are a bound in two ways. Every rule of `tree` only adds to a part's seconds t. And its v lanes
are its own for t, while every other stage i needs lanes of its own for at least its least product
w_i of lanes and seconds: v t + sum of w_i <= N T.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeVar

from m2flow.flow.graph import StageNode, WeightEdge
from m2flow.plan.profile import StageLayout
from m2flow.plan.search.evaluate import edges_within
from m2flow.plan.search.leaves import layout_of, leaf_cost, segments, units
from m2flow.plan.search.problem import Lanes, Problem
from m2flow.plan.search.tree import (
    Bound,
    Chunked,
    Cost,
    Fused,
    Leaf,
    Spatial,
    Split,
    Steps,
    Temporal,
    Tree,
)

FINE = 8
"""Up to so many lanes or replicas every number is tried."""

T = TypeVar("T")
State = tuple[Cost, Tree]
Front = list[State]
Bounds = frozenset[Bound]
Parts = tuple[tuple[Tree, ...], tuple[Lanes, ...]]
Layouts = dict[str, tuple[int, int]]


@cache
def grid(most: int) -> tuple[int, ...]:
    """Every number up to FINE, and those of two significant bits up to `most`."""
    numbers, step = list(range(1, FINE + 1)), FINE
    while step < most:
        numbers += [3 * step // 2, 2 * step]
        step *= 2
    return tuple(number for number in numbers if number <= most)


@cache
def counts(most: int) -> tuple[int, ...]:
    """Lanes that a side of a `Spatial` may have, of so many in all; see the module."""
    powers = [2**n for n in range(most.bit_length()) if 2 ** (n + 1) < most]
    return tuple(sorted({0, most, *grid(most), *(most - power for power in powers)}))


@cache
def replica_counts(count: int, most: int) -> tuple[int, ...]:
    """Replicas worth trying for so many units, of at most so many replicas."""
    if most < 1:
        return ()
    numbers = {min(most, count)}
    numbers.update(range(1, min(most, count, FINE) + 1))
    numbers.update(-(-count // share) for share in grid(count))
    kept, shares = [], set()
    for number in sorted(numbers):
        if number <= most and -(-count // number) not in shares:
            shares.add(-(-count // number))
            kept.append(number)
    return tuple(kept)


def pareto(states: Iterable[tuple[Cost, T]]) -> list[tuple[Cost, T]]:
    """The states that no other one matches or undercuts in everything."""
    front: list[tuple[Cost, T]] = []
    for state in sorted(states, key=lambda state: state[0]):
        a = state[0]
        for b, _ in front:  # b.first <= a.first, as they are sorted
            if (
                b[1] <= a[1]
                and b[2] <= a[2]
                and b[3] <= a[3]
                and b[5] <= a[5]
                and b[4] <= a[4]
                and b[6] <= a[6]
                and b[7] <= a[7]
                and b[8] <= a[8]
            ):
                break
        else:
            front.append(state)
    return front


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to part a set of tasks: the first is an ideal of it.

    Attributes:
        first, second: the parts.
        joined: whether the second reads from the first.
        size: bytes between them for a source item.
        shared: workers with stages in both.
        edges: weight edges whose ends come together here.
    """

    first: int
    second: int
    joined: bool
    size: int
    shared: tuple[str, ...]
    edges: tuple[WeightEdge, ...]


class Solver:
    """One search with fixed layouts for some workers.

    Args:
        problem: what is searched.
        layouts: (lanes, kind) of workers whose layout is given.
        most: seconds of a step beyond which nothing is of interest.
        chunks: chunk sizes that are tried, largest first; each divides the one before.
        lane_counts: lanes that a side of a `Spatial` may have, of so many in all.
        beam: the most states that are kept of a part, with bound workers on as many lanes as can
            be; None for all states and bindings (the answer is then the best).
    """

    _keeps_periods = True

    def __init__(
        self,
        problem: Problem,
        layouts: Layouts,
        most: float = math.inf,
        chunks: tuple[int, ...] | None = None,
        lane_counts: Callable[[int], tuple[int, ...]] = counts,
        beam: int | None = None,
    ) -> None:
        self.problem, self.layouts = problem, layouts
        self.most = most * (1 + 1e-12)
        self.chunks = chunks or tuple(int(size) for size in problem.chunks)
        self._finer = dict(zip(self.chunks, self.chunks[1:], strict=False))
        self._counts = [lane_counts(count) for count in problem.lanes]
        self._step = int(problem.num_items)
        self._fronts: dict[tuple[int, Lanes, int, int, Bounds], Front] = {}
        self._cuts: dict[int, tuple[Cut, ...]] = {}
        self._leaves: dict[tuple[int, Lanes, int, int, Bounds], Front] = {}
        self._streaming = sum(1 << n for n, task in enumerate(problem.tasks) if task.streaming)
        self._kinds = [
            {kind for node in task.nodes for _, _, kind in problem.layouts(node)}
            for task in problem.tasks
        ]
        self._usable: dict[int, tuple[bool, ...]] = {}
        self._beam = beam
        self._limited = any(size is not None for size in problem.memory)
        self._work: list[float] = []
        self._turns: dict[tuple[int, Lanes, int, Bounds], Front] = {}
        self._useful: dict[tuple[str, int, Lanes, int], list[Bound]] = {}
        if math.isfinite(self.most):
            self._work = [self._least_work(n) for n in range(len(problem.tasks))]

    def best(self) -> State | None:
        """The cheapest plan of a step in which one part does not overtake another."""
        whole, step = self.problem.everything, self._step
        front = self.front(whole, self.problem.lanes, step, step, frozenset())
        return _cheapest(front)

    def overlapped(self, parts: int) -> State | None:
        """The cheapest plan in which at most so many parts are at work on different steps."""
        front = self._overlap(self.problem.everything, self.problem.lanes, parts)
        found: Front = []
        for cost, (trees, lanes) in front:
            found.append((cost, trees[0] if len(trees) == 1 else Steps(trees, lanes)))
        return _cheapest(found)

    # Fronts

    def front(self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds) -> Front:
        """Undominated states of a part; at R = m their period is 0, as nobody asks for it."""
        usable = self._usable_kinds(part)
        lanes = tuple(n if use else 0 for n, use in zip(lanes, usable, strict=True))
        if chunk < round_size and not part & self._streaming:
            round_size = self._step
        key = (part, lanes, round_size, chunk, bound)
        found = self._fronts.get(key)
        if found is None:
            states: Iterable[State]
            if (
                part & (part - 1)
                and chunk == round_size < self._step
                and not (part & self._streaming)
                and self._keeps_periods
            ):  # the period is never more than the first chunk, so that all of these are there
                states = self.front(part, lanes, self._step, chunk, bound)
            elif part & (part - 1):
                states = self._composed(part, lanes, round_size, chunk, bound)
            else:
                states = self._leaf(part, lanes, round_size, chunk, bound)
            found = pareto(self._kept(states, part, lanes, round_size, chunk))
            if self._beam is not None and len(found) > self._beam:
                more = round_size // chunk - 1
                found.sort(key=lambda state: state[0][0] + more * state[0][1])
                lean = min(found, key=lambda state: state[0].peak)
                found = [*found[: self._beam], lean]
                found.sort(key=lambda state: state[0])
            self._fronts[key] = found
        return found

    def _in_chunks(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> Front:
        """What a `Chunked` node may have inside."""
        return self.front(part, lanes, round_size, chunk, bound)

    def _most_seconds(self, part: int, lanes: Lanes, round_size: int) -> float:
        """Seconds of a round beyond which a part is of no use."""
        most = self.most
        if self._work:
            rest = sum(work for n, work in enumerate(self._work) if not part >> n & 1)
            used = sum(lanes)
            most = min(most, (most * sum(self.problem.lanes) - rest) / used) if used else most
        return most * round_size / self._step * (1 + 1e-9)

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
        seen: set[Cost] = set()
        for cost, tree in states:
            if cost[3] > 1 or cost[0] + more * cost[1] > most or cost[0] + cost[5] > self.most:
                continue
            if cores is not None and cost.cores > cores:
                continue
            if host is not None and cost.host > host:
                continue
            if whole and cost[1]:
                cost = Cost._make((cost[0], 0.0, *cost[2:]))
            if cost not in seen:
                seen.add(cost)
                yield cost, tree

    def _least_work(self, index: int) -> float:
        """The least product of lanes and seconds with which a task's part of a step is done."""
        least = math.inf
        for chunk in self.chunks:
            for round_size in self.chunks if self.problem.tasks[index].streaming else (chunk,):
                if round_size < chunk:
                    continue
                options = self._options(index, self.problem.lanes, round_size, chunk, {})
                for leaf in options:
                    cost = leaf_cost(self.problem, leaf, round_size, chunk)
                    if cost is not None:
                        seconds = cost.first + (round_size // chunk - 1) * cost.period
                        used = self._lanes_of(leaf)
                        least = min(least, used * seconds * self._step / round_size)
        return 0.0 if math.isinf(least) else least

    def _lanes_of(self, leaf: Leaf | Fused | Split) -> int:
        nodes = self.problem.tasks[leaf.task].nodes
        if isinstance(leaf, Leaf):
            return leaf.replicas * layout_of(self.problem, nodes[0], leaf.layout)[0].lanes
        gangs = [
            layout_of(self.problem, n, at)[0].lanes
            for n, at in zip(nodes, leaf.layouts, strict=True)
        ]
        if isinstance(leaf, Fused):
            return leaf.replicas * gangs[0]
        return sum(count * gang for count, gang in zip(leaf.replicas, gangs, strict=True))

    def _composed(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> Iterator[State]:
        finer = self._finer.get(chunk)
        if finer is not None:
            count = chunk // finer
            for cost, tree in self._in_chunks(part, lanes, round_size, finer, bound):
                first, period = cost.first + (count - 1) * cost.period, count * cost.period
                yield cost._replace(first=first, period=period), _chunked(tree, finer)
        yield from self._in_turn(part, lanes, chunk, bound)
        for cut in self._cuts_of(part):
            if not cut.shared and not bound:
                yield from self._spatial(cut, lanes, round_size, chunk)

    def _in_turn(self, part: int, lanes: Lanes, chunk: int, bound: Bounds) -> Front:
        """Undominated states of a part whose root is `Temporal`; the round does not matter."""
        key = (part, lanes, chunk, bound)
        if key not in self._turns:
            states = (
                state
                for cut in self._cuts_of(part)
                for state in self._temporal(cut, lanes, chunk, bound)
            )
            # Asked for a whole round, such a state is as good as it is within a longer one.
            self._turns[key] = pareto(self._kept(states, part, lanes, chunk, chunk, True))
        return self._turns[key]

    def _temporal(self, cut: Cut, lanes: Lanes, chunk: int, bound: Bounds) -> Iterator[State]:
        known = {where.worker for where in bound}
        fresh = [worker for worker in cut.shared if worker not in known]
        publishing = self._publish(cut, "same", together=True)
        if publishing is None:
            return
        most = self._most_seconds(cut.first | cut.second, lanes, chunk)
        hosted = self.problem.limits.host_bytes is not None
        part = cut.first | cut.second
        options = [self._useful_bounds(worker, part, lanes, chunk, most) for worker in fresh]
        for binding in product(*options):
            within = bound | set(binding)
            left = self.front(cut.first, lanes, chunk, chunk, self._seen(within, cut.first))
            if not left:
                continue
            right = self.front(cut.second, lanes, chunk, chunk, self._seen(within, cut.second))
            share, swap, size = 0.0, 0.0, 0
            for where in binding:
                if where.held:
                    one = self.problem.state(where.worker, where.lanes, where.kind)
                    share, swap = share + one[0], swap + (one[1] if self._limited else 0.0)
                    size += one[2] * where.replicas * where.lanes if hosted else 0
            for x, a in left:
                for y, b in right:
                    first = x[0] + y[0]
                    if first > most:
                        break  # they are in order of their seconds
                    pay = x.publishing + y.publishing + publishing
                    cores, states = max(x.cores, y.cores), x.states + y.states + size
                    yield (
                        Cost(
                            first,
                            first,
                            x.resident + y.resident + share,
                            max(x.peak + y.resident, x.resident + y.peak) + share,
                            x.swap + y.swap + swap,
                            pay,
                            cores,
                            max(x.host, y.host),
                            states,
                        ),
                        Temporal(a, b, False, binding),
                    )
                    if self._limited and (x.resident or y.resident):
                        first += x.swap + y.swap
                        yield (
                            Cost(
                                first,
                                first,
                                max(x.resident, y.resident) + share,
                                max(x.peak, y.peak) + share,
                                max(x.swap, y.swap) + swap,
                                pay,
                                cores,
                                max(x.host, y.host) + x.states + y.states,
                                states,
                            ),
                            Temporal(a, b, True, binding),
                        )

    def _spatial(self, cut: Cut, lanes: Lanes, round_size: int, chunk: int) -> Iterator[State]:
        none: Bounds = frozenset()
        more = round_size // chunk - 1
        most = self._most_seconds(cut.first | cut.second, lanes, round_size)
        charged = bool(cut.size and self.problem.profile.links)
        before: tuple[list[Cost], str] | None = None
        for mine, other in self._splits(cut, lanes):
            left = self.front(cut.first, mine, round_size, chunk, none)
            place = self.problem.place(sum(mine) + sum(other))
            same = ([cost for cost, _ in left], place)
            if not left or (same == before and not charged):
                continue  # the first part gains nothing from more lanes, the second has fewer
            right = self.front(cut.second, other, round_size, chunk, none)
            if not right:
                continue
            totals = sum(mine), sum(other)
            publishing = self._publish(cut, place)
            assert publishing is not None
            link = self.problem.link_seconds(cut.size * chunk, *totals) if charged else 0.0
            for x, a in left:
                for y, b in right:
                    if cut.joined:
                        first = x.first + y.first + link
                        period = max(x.period, y.period, link)
                    else:
                        first, period = max(x.first, y.first), max(x.period, y.period)
                    if first + more * period > most:
                        continue
                    yield (
                        Cost(
                            first,
                            period,
                            max(x.resident, y.resident),
                            max(x.peak, y.peak),
                            max(x.swap, y.swap),
                            x.publishing + y.publishing + publishing,
                            x.cores + y.cores,
                            x.host + y.host,
                            x.states + y.states,
                        ),
                        Spatial(a, b, mine, other),
                    )
            before = same if len(self.problem.kinds) == 1 else None

    # Overlapping steps

    def _overlap(self, part: int, lanes: Lanes, parts: int) -> list[tuple[Cost, Parts]]:
        step, none = self._step, frozenset[Bound]()
        found: list[tuple[Cost, Parts]] = [
            (cost, ((tree,), (lanes,))) for cost, tree in self.front(part, lanes, step, step, none)
        ]
        cuts = self._cuts_of(part) if parts > 1 else ()
        for cut in cuts:
            if cut.shared:
                continue
            publishing = self._publish(cut, self.problem.place(sum(self.problem.lanes)))
            assert publishing is not None
            for mine, other in self._splits(cut, lanes):
                left = self.front(cut.first, mine, step, step, none)
                if not left or not any(other):
                    continue
                link = self.problem.link_seconds(cut.size * step, sum(mine), sum(other))
                for y, (trees, spots) in self._overlap(cut.second, other, parts - 1):
                    for x, tree in left:
                        cost = Cost(
                            max(x.first, y.first, link),
                            0.0,
                            max(x.resident, y.resident),
                            max(x.peak, y.peak),
                            max(x.swap, y.swap),
                            x.publishing + y.publishing + publishing,
                            x.cores + y.cores,
                            x.host + y.host,
                            x.states + y.states,
                        )
                        found.append((cost, ((tree, *trees), (mine, *spots))))
        return pareto(found)

    # Leaves

    def _leaf(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: Bounds
    ) -> Iterator[State]:
        index = part.bit_length() - 1
        held = frozenset(where.worker for where in bound if where.held)
        places = {where.worker: where for where in bound}
        paid = self._publish_within(part)
        limits = self.problem.limits
        for leaf in self._options(index, lanes, round_size, chunk, places):
            cost = leaf_cost(self.problem, leaf, round_size, chunk, held)
            if cost is not None:  # what nothing limits is not counted
                hosted = limits.host_bytes is not None
                cost = cost._replace(
                    publishing=paid,
                    swap=cost.swap if self._limited else 0.0,
                    cores=cost.cores if limits.cores is not None else 0.0,
                    host=cost.host if hosted else 0.0,
                    states=cost.states if hosted else 0.0,
                )
                yield cost, leaf

    def _options(
        self, index: int, lanes: Lanes, round_size: int, chunk: int, places: dict[str, Bound]
    ) -> Iterator[Leaf | Fused | Split]:
        if self.problem.tasks[index].is_loop:
            return self._loop_options(index, lanes, chunk, places)
        return self._stage_options(index, lanes, round_size, chunk, places)

    def _allowed(self, node: StageNode, lanes: int, kind: int) -> bool:
        given = self.layouts.get(node.worker)
        return given is None or given == (lanes, kind)

    def _stage_options(
        self, index: int, lanes: Lanes, round_size: int, chunk: int, places: dict[str, Bound]
    ) -> Iterator[Leaf | Fused | Split]:
        node = self.problem.tasks[index].nodes[0]
        where = places.get(node.worker)
        window = self._step // node.minibatches
        count = units(node, round_size if node.streaming else min(chunk, window))[0]
        for number, layout, kind in self.problem.layouts(node):
            if not self._allowed(node, layout.lanes, kind):
                continue
            most = lanes[kind] // layout.lanes
            if where is not None:
                if (where.lanes, where.kind) != (layout.lanes, kind) or where.replicas > most:
                    continue
                replicas: Iterable[int] = (where.replicas,)
            else:
                replicas = replica_counts(count, most)
            calls = self.problem.calls if layout.working and not node.streaming else (1,)
            for number_of in replicas:
                for cut in calls:
                    yield Leaf(index, number, number_of, cut)

    def _loop_options(
        self, index: int, lanes: Lanes, chunk: int, places: dict[str, Bound]
    ) -> Iterator[Leaf | Fused | Split]:
        problem, nodes = self.problem, self.problem.tasks[index].nodes
        menus = [
            [entry for entry in problem.layouts(n) if self._allowed(n, entry[1].lanes, entry[2])]
            for n in nodes
        ]
        items = chunk * nodes[0].fanout
        wheres = [places[n.worker] for n in nodes if n.worker in places]
        for combination in product(*menus):
            numbers = tuple(entry[0] for entry in combination)
            gangs = {(entry[1].lanes, entry[2]) for entry in combination}
            if len(gangs) == 1:
                ((gang, kind),) = gangs
                most = lanes[kind] // gang
                replicas: tuple[int, ...] = self._loop_counts(index, items, (1,), most)
                if wheres:
                    same = {(w.lanes, w.kind, w.replicas) for w in wheres}
                    count = wheres[0].replicas
                    fits = same == {(gang, kind, count)} and count <= most
                    replicas = (count,) if fits else ()
                for count in replicas:
                    yield Fused(index, numbers, count)
            if not wheres and len({n.worker for n in nodes}) == len(nodes):
                for counts_of in self._loop_replicas(index, combination, lanes, items):
                    for groups in problem.groups:
                        yield Split(index, numbers, counts_of, groups)

    def _loop_counts(
        self, index: int, items: int, groups: tuple[int, ...], most: int
    ) -> tuple[int, ...]:
        """Replicas of a cycle's member: what helps while all items are in it, or fewer."""
        numbers: set[int] = set()
        for _, share in segments(self.problem, index):
            for parts in groups:
                active = max(1, round(items * share))
                numbers.update(replica_counts(-(-active // parts), most))
        return tuple(sorted(numbers))

    def _loop_replicas(
        self,
        index: int,
        combination: tuple[tuple[int, StageLayout, int], ...],
        lanes: Lanes,
        items: int,
    ) -> Iterator[tuple[int, ...]]:
        """Replicas of members that stand apart, within the lanes there are."""
        if not combination:
            yield ()
            return
        _, layout, kind = combination[0]
        gang = layout.lanes
        for count in self._loop_counts(index, items, self.problem.groups, lanes[kind] // gang):
            left = tuple(n - count * gang * (k == kind) for k, n in enumerate(lanes))
            for rest in self._loop_replicas(index, combination[1:], left, items):
                yield (count, *rest)

    # What cuts and bindings there are

    def _cuts_of(self, part: int) -> tuple[Cut, ...]:
        if part not in self._cuts:
            self._cuts[part] = tuple(self._find_cuts(part))
        return self._cuts[part]

    def _find_cuts(self, part: int) -> Iterator[Cut]:
        problem = self.problem
        members = [n for n in range(len(problem.tasks)) if part >> n & 1]
        first = (part - 1) & part
        while first:
            inside = all(
                not problem.tasks[n].before & part & ~first for n in members if first >> n & 1
            )
            if inside:
                second = part & ~first
                joined, size = problem.crossing(first, second)
                if not joined and not first & part & -part:
                    first = (first - 1) & part
                    continue  # the same the other way round
                shared = tuple(
                    sorted(w for w, on in problem.tasks_of.items() if on & first and on & second)
                )
                inner = edges_within(problem, first) + edges_within(problem, second)
                edges = tuple(e for e in edges_within(problem, part) if e not in inner)
                yield Cut(first, second, joined, size, shared, edges)
            first = (first - 1) & part

    def _bounds(self, worker: str, lanes: Lanes, chunk: int) -> list[Bound]:
        """Layouts and replicas in which a worker may be bound."""
        problem = self.problem
        nodes = [n for task in problem.tasks for n in task.nodes if n.worker == worker]
        given = self.layouts.get(worker)
        every = self._beam is None and sum(lanes) <= FINE
        modes = (True, False) if self._limited else (True,)
        found = []
        for gang, kind in problem.worker_layouts(worker):
            if given is not None and given != (gang, kind):
                continue
            numbers: set[int] = set()
            for node in nodes:
                window = self._step // node.minibatches
                sizes = (chunk,) if node.streaming else (min(chunk, window),)
                for size in sizes:
                    count = units(node, size)[0]
                    numbers.update(replica_counts(count, lanes[kind] // gang))
            found += [
                Bound(worker, gang, kind, count, held)
                for count in (sorted(numbers) if every else sorted(numbers)[-1:])
                for held in modes
            ]
        return found

    def _useful_bounds(
        self, worker: str, part: int, lanes: Lanes, chunk: int, most: float
    ) -> list[Bound]:
        """Bindings with which the part may be fast enough.

        While a bound stage runs, nothing else does on the node's lanes, so that its seconds add to
        what the other stages of the part need at least.
        """
        key = (worker, part, lanes, chunk)
        if key not in self._useful:
            tasks = self.problem.tasks_of[worker] & part
            rest = sum(w for n, w in enumerate(self._work) if (part & ~tasks) >> n & 1)
            rest *= chunk / self._step / max(1, sum(lanes))
            self._useful[key] = [
                where
                for where in self._bounds(worker, lanes, chunk)
                if self._least_seconds(where, tasks, lanes, chunk) + rest <= most
            ]
        return self._useful[key]

    def _least_seconds(self, where: Bound, tasks: int, lanes: Lanes, chunk: int) -> float:
        """The least seconds of a bound worker's stages for a chunk, in whatever pieces."""
        total, within = 0.0, frozenset((where,))
        for n in range(len(self.problem.tasks)):
            if tasks >> n & 1 and not self.problem.tasks[n].streaming:
                fronts = (
                    (chunk // size, self.front(1 << n, lanes, size, size, within))
                    for size in self.chunks
                    if size <= chunk
                )
                total += min((count * f[0][0].first for count, f in fronts if f), default=math.inf)
        return total

    def _seen(self, bound: Bounds, part: int) -> Bounds:
        """Of the bindings those that concern a part."""
        of = self.problem.tasks_of
        return frozenset(where for where in bound if of[where.worker] & part)

    def _usable_kinds(self, part: int) -> tuple[bool, ...]:
        if part not in self._usable:
            kinds = set().union(*(k for n, k in enumerate(self._kinds) if part >> n & 1))
            self._usable[part] = tuple(n in kinds for n in range(len(self.problem.kinds)))
        return self._usable[part]

    def _splits(self, cut: Cut, lanes: Lanes) -> Iterator[tuple[Lanes, Lanes]]:
        """Lanes of the two sides: the first has a count of the grid, the second what is left."""
        left, right = self._usable_kinds(cut.first), self._usable_kinds(cut.second)
        options = []
        for n, (mine, other, menu) in enumerate(zip(left, right, self._counts, strict=True)):
            most = lanes[n]
            if mine and other:
                options.append([(x, _floor(menu, most - x)) for x in menu if x <= most])
            elif mine:
                options.append([(most, 0)])
            else:
                options.append([(0, most if other else 0)])
        for pairs in product(*options):
            yield tuple(x for x, _ in pairs), tuple(y for _, y in pairs)
        per_node = self.problem.limits.lanes_per_node
        if per_node is not None and len(lanes) == 1 and lanes[0] > per_node:
            menu = self._counts[0]  # the same within one machine, where links are better
            yield from (((x,), (_floor(menu, per_node - x),)) for x in menu if x < per_node)

    # Publishing

    def _layout(self, worker: str) -> tuple[int, int]:
        return self.layouts.get(worker) or self.problem.worker_layouts(worker)[0]

    def _publish(self, cut: Cut, place: str, *, together: bool = False) -> float | None:
        """Seconds of the weight edges of a cut; None where the states do not fit together."""
        seconds = 0.0
        for edge in cut.edges:
            (source, kind), (target, other) = self._layout(edge.source), self._layout(edge.target)
            if together and kind == other:
                states = (
                    self.problem.state(edge.source, source, kind)[0]
                    + self.problem.state(edge.target, target, other)[0]
                )
                if states > 1:
                    return None
            seconds += self.problem.profile.publish_seconds(
                edge.source, edge.target, place, source, target
            )
        return seconds

    def _publish_within(self, part: int) -> float:
        """Weight edges inside a leaf."""
        seconds = 0.0
        for edge in edges_within(self.problem, part):
            source, target = self._layout(edge.source)[0], self._layout(edge.target)[0]
            seconds += self.problem.profile.publish_seconds(
                edge.source, edge.target, "same", source, target
            )
        return seconds


def _chunked(tree: Tree, chunk: int) -> Tree:
    return tree if isinstance(tree, Chunked) else Chunked(tree, chunk)


def _floor(menu: tuple[int, ...], most: int) -> int:
    return menu[bisect_right(menu, most) - 1]


def _cheapest(front: Front) -> State | None:
    return min(front, key=lambda state: state[0].first + state[0].publishing, default=None)
