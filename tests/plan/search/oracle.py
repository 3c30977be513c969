"""Brute force: the costs of all plan trees of a small problem, none left out for being worse.

It follows the words of `m2flow.plan.search.tree` by plain loops: every cut into an ideal and the
rest, every number of lanes, every chunk, layout, binding and number of replicas. Equal costs are
kept once; nothing else is dropped but what breaks a limit, and memory limits are checked at the end
of each node (whatever is above only adds).
"""

from __future__ import annotations

import math
from itertools import product

from m2flow.flow.graph import StageNode
from m2flow.plan.profile import StageCost
from m2flow.plan.search.leaves import leaf_cost
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.tree import Bound, Fused, Leaf, Split
from m2flow.plan.search.weights import edges_within

Lanes = tuple[int, ...]
Costs = tuple[float, ...]
"""The entries of a `Cost`, in its order."""


def brute_force(problem: Problem, parts: int = 1) -> float:
    """Seconds of the best plan of a step with so many overlapping parts; infinite if none fits."""
    choices = [
        {(worker, layout) for layout in worker_layouts(problem, worker)}
        for worker in sorted({w for e in problem.weight_edges for w in (e.source, e.target)})
    ]
    best = math.inf
    for choice in product(*choices):
        trees = Oracle(problem, dict(choice))
        if parts == 1:
            best = min(best, trees.best())
        else:
            found = trees.steps(problem.everything, problem.lanes, parts)
            best = min([best, *(cost[0] + cost[5] for cost in found)])
    return best


def layouts(problem: Problem, node: StageNode) -> list[tuple[int, StageCost, int]]:
    """Ways to run a stage, as `Problem.layouts` has them."""
    alone = node.sticky or (node.streaming and node.is_function)
    found = []
    for number, layout in enumerate(problem.profile.stage(node.name).costs):
        for kind, name in enumerate(problem.kinds):
            known = problem.profile.worker(node.worker, layout.lanes, name)
            possible = layout.kind == name and known is not None
            if possible and (layout.lanes == 1 or not alone):
                found.append((number, layout, kind))
    return found


def worker_layouts(problem: Problem, worker: str) -> list[tuple[int, int]]:
    """(lanes of a replica, kind) in which all stages of a worker can run."""
    nodes = [node for node in problem.graph.nodes if node.worker == worker]
    menus = [{(one.lanes, kind) for _, one, kind in layouts(problem, node)} for node in nodes]
    return [entry for entry in sorted(menus[0]) if all(entry in menu for menu in menus)]


class Oracle:
    """All costs, with given layouts for the workers of weight edges."""

    def __init__(self, problem: Problem, layouts: dict[str, tuple[int, int]]) -> None:
        self.p, self.layouts = problem, layouts
        self.memo: dict[tuple, set[Costs]] = {}
        self.unlimited = all(size is None for size in problem.memory)

    def best(self) -> float:
        """Seconds of the best tree of everything: all are gone through, none is kept."""
        step, whole, best = int(self.p.num_items), self.p.everything, math.inf
        if not whole & (whole - 1):
            found = self.costs(whole, self.p.lanes, step, step, ())
            return min((cost[0] + cost[5] for cost in found), default=math.inf)
        for chunk in (int(size) for size in self.p.chunks):
            for a, b in self.cuts(whole):
                ways = [self.in_turn(whole, a, b, self.p.lanes, chunk, ())]
                if not self.shared(a, b):
                    ways.append(self.spatial(whole, a, b, self.p.lanes, step, chunk))
                for costs in ways:
                    for cost in costs:
                        seconds = cost[0] + (step // chunk - 1) * cost[1] + cost[5]
                        if seconds < best and self.fits(cost):
                            best = seconds
        return best

    def steps(self, part: int, lanes: Lanes, parts: int) -> set[Costs]:
        """Costs of parts that are at work on different steps."""
        step = int(self.p.num_items)
        found = set(self.costs(part, lanes, step, step, ()))
        if parts == 1:
            return found
        for a, b in self.cuts(part):
            if self.shared(a, b):
                continue
            for mine, other in self.splits(a, b, lanes):
                pay = self.publishing(part, a, b, self.p.place(sum(self.p.lanes)))
                size = self.p.crossing(a, b)[1] * step
                link = (
                    self.p.link_seconds(size, sum(mine), sum(other))
                    if min(sum(mine), sum(other))
                    else math.inf
                )
                for x in self.costs(a, mine, step, step, ()):
                    for y in self.steps(b, other, parts - 1):
                        cost = self.apart(x, y, max(x[0], y[0], link), 0.0, pay)
                        if self.fits(cost):
                            found.add(cost)
        return found

    def costs(
        self, part: int, lanes: Lanes, round_size: int, chunk: int, bound: tuple[Bound, ...]
    ) -> set[Costs]:
        """Costs of all trees of a part."""
        key = (part, lanes, round_size, chunk, bound)
        if key not in self.memo:
            if part & (part - 1):
                found = self.composed(part, lanes, round_size, chunk, bound)
            else:
                found = self.leaves(part, lanes, round_size, chunk, bound)
            whole = round_size == chunk
            self.memo[key] = {self.plain(cost, whole) for cost in found if self.fits(cost)}
        return self.memo[key]

    def plain(self, cost: Costs, whole: bool) -> Costs:
        """Rounded far below what counts, without what nobody asks for."""
        return (
            round(cost[0], 9),
            0.0 if whole else round(cost[1], 9),
            round(cost[2], 12),
            round(cost[3], 12),
            0.0 if self.unlimited else round(cost[4], 9),
            round(cost[5], 9),
            0.0 if self.p.limits.cores is None else cost[6],
            0.0 if self.p.limits.host_bytes is None else cost[7],
            0.0 if self.p.limits.host_bytes is None else cost[8],
        )

    def fits(self, cost: Costs) -> bool:
        limits = self.p.limits
        return (
            cost[3] <= 1
            and (limits.cores is None or cost[6] <= limits.cores)
            and (limits.host_bytes is None or cost[7] <= limits.host_bytes)
        )

    def composed(self, part, lanes, round_size, chunk, bound):
        sizes = [int(size) for size in self.p.chunks]
        for finer in sizes:
            if finer < chunk:
                count = chunk // finer
                for cost in self.composed_at(part, lanes, round_size, finer, bound):
                    first, period = cost[0] + (count - 1) * cost[1], count * cost[1]
                    yield (first, period, *cost[2:])
        yield from self.composed_at(part, lanes, round_size, chunk, bound)

    def composed_at(self, part, lanes, round_size, chunk, bound):
        """Trees whose root cuts the part in two."""
        key = ("at", part, lanes, round_size, chunk, bound)
        if key not in self.memo:
            found = set()
            for a, b in self.cuts(part):
                found |= set(self.temporal(part, a, b, lanes, chunk, bound))
                if not self.shared(a, b) and not bound:
                    found |= set(self.spatial(part, a, b, lanes, round_size, chunk))
            self.memo[key] = {self.plain(cost, False) for cost in found if self.fits(cost)}
        return self.memo[key]

    def temporal(self, part, a, b, lanes, chunk, bound):
        key = ("temporal", a, b, lanes, chunk, bound)
        if key not in self.memo:
            found = {self.plain(c, False) for c in self.in_turn(part, a, b, lanes, chunk, bound)}
            self.memo[key] = {cost for cost in found if self.fits(cost)}
        return self.memo[key]

    def in_turn(self, part, a, b, lanes, chunk, bound):
        # Where nothing limits memory, states stay where they are and cost nothing.
        modes = (False,) if self.unlimited else (False, True)
        known = {where.worker for where in bound}
        fresh = [worker for worker in self.shared(a, b) if worker not in known]
        if not self.together(part, a, b):
            return
        pay = self.publishing(part, a, b, "same")
        for binding in product(*(self.bindings(worker, lanes) for worker in fresh)):
            within = (*bound, *binding)
            held = [(w, self.p.state(w.worker, w.lanes, w.kind)) for w in binding if w.held]
            share, swap = sum(s[0] for _, s in held), sum(s[1] for _, s in held)
            size = sum(s[2] * w.replicas * w.lanes for w, s in held)
            for x in self.costs(a, lanes, chunk, chunk, self.seen(within, a)):
                for y in self.costs(b, lanes, chunk, chunk, self.seen(within, b)):
                    for switched in modes:
                        both, extra = x[0] + y[0], 0.0
                        resident, peak = x[2] + y[2], max(x[3] + y[2], x[2] + y[3])
                        keeps, host = x[4] + y[4], max(x[7], y[7])
                        if switched:
                            extra = x[4] + y[4]
                            resident, peak = max(x[2], y[2]), max(x[3], y[3])
                            keeps, host = max(x[4], y[4]), max(x[7], y[7]) + x[8] + y[8]
                        yield (
                            both + extra,
                            both + extra,
                            resident + share,
                            peak + share,
                            keeps + swap,
                            x[5] + y[5] + pay,
                            max(x[6], y[6]),
                            host,
                            x[8] + y[8] + size,
                        )

    def spatial(self, part, a, b, lanes, round_size, chunk):
        joined, size = self.p.crossing(a, b)
        for mine, other in self.splits(a, b, lanes):
            left = self.costs(a, mine, round_size, chunk, ())
            right = self.costs(b, other, round_size, chunk, ())
            if not left or not right:
                continue
            pay = self.publishing(part, a, b, self.p.place(sum(mine) + sum(other)))
            link = self.p.link_seconds(size * chunk, sum(mine), sum(other))
            for x in left:
                for y in right:
                    first, period = max(x[0], y[0]), max(x[1], y[1])
                    if joined:
                        first, period = x[0] + y[0] + link, max(period, link)
                    yield self.apart(x, y, first, period, pay)

    @staticmethod
    def apart(x: Costs, y: Costs, first: float, period: float, pay: float) -> Costs:
        return (
            first,
            period,
            max(x[2], y[2]),
            max(x[3], y[3]),
            max(x[4], y[4]),
            x[5] + y[5] + pay,
            x[6] + y[6],
            x[7] + y[7],
            x[8] + y[8],
        )

    def leaves(self, part, lanes, round_size, chunk, bound):
        index = part.bit_length() - 1
        nodes = self.p.tasks[index].nodes
        held = {where.worker for where in bound if where.held}
        places = {where.worker: where for where in bound}
        pay = sum(self.price(edge, "same") for edge in edges_within(self.p, part))
        menus = [
            [
                entry
                for entry in layouts(self.p, node)
                if self.layouts.get(node.worker) in (None, (entry[1].lanes, entry[2]))
            ]
            for node in nodes
        ]
        for combination in product(*menus):
            for leaf in self.ways(index, nodes, combination, lanes, places):
                cost = leaf_cost(self.p, leaf, round_size, chunk, held)
                if cost is not None:
                    yield (*cost[:5], pay, *cost[6:])

    def ways(self, index, nodes, combination, lanes, places):
        numbers = tuple(entry[0] for entry in combination)
        if len(nodes) == 1:
            ((number, layout, kind),) = combination
            where = places.get(nodes[0].worker)
            most = lanes[kind] // layout.lanes
            # A call never takes longer on more replicas; only what is paid for them makes fewer
            # worth while.
            free = not layout.cores and not layout.host_bytes and not layout.finish
            free = free and self.p.limits.host_bytes is None
            for replicas in range(most if free and most else 1, most + 1):
                if where is None or (where.lanes, where.kind, where.replicas) == (
                    layout.lanes,
                    kind,
                    replicas,
                ):
                    for calls in self.p.calls:
                        yield Leaf(index, number, replicas, calls)
            same = where is not None and (where.lanes, where.kind) == (layout.lanes, kind)
            if same and free and where.replicas < most:
                for calls in self.p.calls:
                    yield Leaf(index, number, where.replicas, calls)
            return
        wheres = [places[node.worker] for node in nodes if node.worker in places]
        gangs = {(entry[1].lanes, entry[2]) for entry in combination}
        if len(gangs) == 1:
            ((gang, kind),) = gangs
            for replicas in range(1, lanes[kind] // gang + 1):
                if all((w.lanes, w.kind, w.replicas) == (gang, kind, replicas) for w in wheres):
                    yield Fused(index, numbers, replicas)
        if not wheres:
            menus = [range(1, lanes[kind] // lay.lanes + 1) for _, lay, kind in combination]
            for replicas in product(*menus):
                used = [0] * len(lanes)
                for count, (_, layout, kind) in zip(replicas, combination, strict=True):
                    used[kind] += count * layout.lanes
                if all(mine <= there for mine, there in zip(used, lanes, strict=True)):
                    for groups in self.p.groups:
                        yield Split(index, numbers, replicas, groups)

    def cuts(self, part):
        tasks = self.p.tasks
        for first in range(1, part):
            if first & ~part or first == part:
                continue
            if all(
                not (tasks[n].before & part & ~first) for n in range(len(tasks)) if first >> n & 1
            ):
                yield first, part & ~first

    def splits(self, a, b, lanes: Lanes):
        left, right = self.kinds_of(a), self.kinds_of(b)
        menus = [
            range(n + 1) if k in left & right else (n if k in left else 0,)
            for k, n in enumerate(lanes)
        ]
        for mine in product(*menus):
            rest = (all_of - n for all_of, n in zip(lanes, mine, strict=True))
            yield mine, tuple(n if k in right else 0 for k, n in enumerate(rest))
        per_node = self.p.limits.lanes_per_node
        if per_node is not None and len(lanes) == 1:  # idle lanes may save the way between machines
            for total in range(2, lanes[0]):
                yield from (((n,), (total - n,)) for n in range(1, total))

    def kinds_of(self, part):
        """Kinds of lanes on which some stage of a part can run."""
        nodes = [n for k, task in enumerate(self.p.tasks) if part >> k & 1 for n in task.nodes]
        return {kind for node in nodes for _, _, kind in layouts(self.p, node)}

    def shared(self, a, b):
        return [w for w, tasks in sorted(self.p.tasks_of.items()) if tasks & a and tasks & b]

    def seen(self, bound, part):
        return tuple(w for w in bound if self.p.tasks_of[w.worker] & part)

    def bindings(self, worker, lanes):
        given = self.layouts.get(worker)
        for gang, kind in worker_layouts(self.p, worker):
            if given in (None, (gang, kind)):
                for replicas in range(1, lanes[kind] // gang + 1):
                    for held in (True,) if self.unlimited else (True, False):
                        yield Bound(worker, gang, kind, replicas, held)

    def meeting(self, part, a, b):
        inner = edges_within(self.p, a) + edges_within(self.p, b)
        return [edge for edge in edges_within(self.p, part) if edge not in inner]

    def price(self, edge, place):
        source, target = self.layouts[edge.source][0], self.layouts[edge.target][0]
        return self.p.profile.publish_seconds(edge.source, edge.target, place, source, target)

    def publishing(self, part, a, b, place):
        return sum(self.price(edge, place) for edge in self.meeting(part, a, b))

    def together(self, part, a, b):
        for edge in self.meeting(part, a, b):
            (source, kind), (target, other) = self.layouts[edge.source], self.layouts[edge.target]
            states = self.p.state(edge.source, source, kind)[0]
            states += self.p.state(edge.target, target, other)[0]
            if kind == other and states > 1:
                return False
        return True
