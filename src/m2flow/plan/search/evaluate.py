"""The cost of one given plan tree: the words of `tree`, written out once.

The search never calls this to compare plans; it says what the chosen plan's seconds are made of,
and is what brute force over all trees adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.errors import PlanError
from m2flow.flow.graph import WeightEdge
from m2flow.plan.search.leaves import layout_of, leaf_cost
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
    leaves,
    mask,
)


@dataclass(frozen=True, slots=True)
class Terms:
    """What seconds are made of: work, states brought and taken away, links, and waiting for the
    slowest part of a pipeline while it fills and drains."""

    compute: float = 0.0
    switching: float = 0.0
    links: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: Terms) -> Terms:
        return Terms(
            self.compute + other.compute,
            self.switching + other.switching,
            self.links + other.links,
            self.waiting + other.waiting,
        )

    def times(self, count: float) -> Terms:
        """So many times all of it."""
        return Terms(
            count * self.compute, count * self.switching, count * self.links, count * self.waiting
        )

    @property
    def total(self) -> float:
        return self.compute + self.switching + self.links + self.waiting


@dataclass(frozen=True, slots=True)
class Priced:
    """A node's cost, and what its first chunk and its period are made of."""

    cost: Cost
    first: Terms
    period: Terms


class Infeasible(PlanError):
    """A plan tree that breaks a limit or a rule of its words."""


def evaluate(problem: Problem, tree: Tree) -> Priced:
    """What a plan tree costs a step.

    Raises:
        Infeasible: it breaks a rule or a limit; says which.
    """
    if isinstance(tree, Steps):
        return _steps(problem, tree)
    everything = int(problem.num_items)
    priced = _price(problem, tree, problem.lanes, everything, everything, {})
    check_limits(problem, priced.cost)
    return priced


def step_seconds(problem: Problem, cost: Cost) -> float:
    """Seconds of a step whose root costs this."""
    return cost.first + cost.publishing + companions_seconds(problem)


def companions_seconds(problem: Problem) -> float:
    """Publishing to workers that have no stage in the step and stand beside their source."""
    return sum(
        problem.profile.publish_seconds(source, target, "same", 1, 1)
        for source, targets in problem.companions.items()
        for target in targets
    )


def check_limits(problem: Problem, cost: Cost) -> None:
    """Refuse what takes more than there is.

    Raises:
        Infeasible: says what there is too little of.
    """
    limits = problem.limits
    if cost.peak > 1:
        raise Infeasible("takes more memory than a lane has", value=cost.peak, expected="at most 1")
    if limits.cores is not None and cost.cores > limits.cores:
        raise Infeasible("takes more cores than there are", value=cost.cores)
    if limits.host_bytes is not None and cost.host > limits.host_bytes:
        raise Infeasible("takes more memory than the machines have", value=cost.host)


def edges_within(problem: Problem, part: int) -> list[WeightEdge]:
    """Weight edges both of whose workers have all their stages in a part of the tasks."""
    of = problem.tasks_of
    return [
        edge for edge in problem.weight_edges if not (of[edge.source] | of[edge.target]) & ~part
    ]


def edge_layouts(problem: Problem, tree: Tree) -> Mapping[str, tuple[int, int]]:
    """(lanes of a replica, kind) of each worker in a tree."""
    found = {}
    for leaf in leaves(tree):
        numbers = (leaf.layout,) if isinstance(leaf, Leaf) else leaf.layouts
        for node, number in zip(problem.tasks[leaf.task].nodes, numbers, strict=True):
            layout, kind = layout_of(problem, node, number)
            found[node.worker] = (layout.lanes, kind)
    return found


def _price(
    problem: Problem, tree: Tree, lanes: Lanes, round_size: int, chunk: int, bound: dict[str, Bound]
) -> Priced:
    match tree:
        case Leaf() | Fused() | Split():
            priced = _leaf(problem, tree, lanes, round_size, chunk, bound)
            return _publishing(problem, tree, priced, 0, "same")
        case Chunked():
            count, uneven = divmod(chunk, tree.chunk)
            if uneven:
                raise Infeasible("cuts a chunk into uneven parts", value=tree.chunk)
            within = _price(problem, tree.inner, lanes, round_size, tree.chunk, bound)
            cost = within.cost._replace(
                first=within.cost.first + (count - 1) * within.cost.period,
                period=count * within.cost.period,
            )
            terms = within.first + within.period.times(count - 1)
            return Priced(cost, terms, within.period.times(count))
        case Temporal():
            return _temporal(problem, tree, lanes, chunk, bound)
        case Spatial():
            return _spatial(problem, tree, lanes, round_size, chunk, bound)
        case Steps():
            raise Infeasible("steps overlap at the root only")


def _leaf(
    problem: Problem,
    leaf: Leaf | Fused | Split,
    lanes: Lanes,
    round_size: int,
    chunk: int,
    bound: dict[str, Bound],
) -> Priced:
    held = {worker for worker, where in bound.items() if where.held}
    cost = leaf_cost(problem, leaf, round_size, chunk, held)
    if cost is None:
        raise Infeasible("a stage cannot work on such chunks", value=chunk)
    numbers = (leaf.layout,) if isinstance(leaf, Leaf) else leaf.layouts
    replicas = leaf.replicas if isinstance(leaf, Split) else (leaf.replicas,) * len(numbers)
    used, gangs = [0] * len(lanes), set()
    for node, number, count in zip(problem.tasks[leaf.task].nodes, numbers, replicas, strict=True):
        layout, kind = layout_of(problem, node, number)
        gangs.add((layout.lanes, kind))
        used[kind] = count * layout.lanes + (used[kind] if isinstance(leaf, Split) else 0)
        where = bound.get(node.worker)
        if where and (
            isinstance(leaf, Split)
            or (where.lanes, where.kind, where.replicas)
            != (
                layout.lanes,
                kind,
                count,
            )
        ):
            raise Infeasible("a worker stands in two places", key=node.worker)
    if isinstance(leaf, Fused) and len(gangs) > 1:
        raise Infeasible("a fused cycle has one layout", value=sorted(gangs))
    if any(mine > there for mine, there in zip(used, lanes, strict=True)):
        raise Infeasible("takes more lanes than it has", value=used)
    return Priced(cost, Terms(cost.first), Terms(cost.period))


def _temporal(
    problem: Problem, tree: Temporal, lanes: Lanes, chunk: int, bound: dict[str, Bound]
) -> Priced:
    within = bound | {where.worker: where for where in tree.bound}
    parts = mask(tree.first), mask(tree.second)
    for worker, tasks in problem.tasks_of.items():
        if tasks & parts[0] and tasks & parts[1] and worker not in within:
            raise Infeasible("a worker on both sides is not bound", key=worker)
    a = _price(problem, tree.first, lanes, chunk, chunk, within)
    b = _price(problem, tree.second, lanes, chunk, chunk, within)
    x, y = a.cost, b.cost
    if tree.switched:
        resident, peak, swap = max(x.resident, y.resident), max(x.peak, y.peak), max(x.swap, y.swap)
        switching = x.swap + y.swap
        host = max(x.host, y.host) + x.states + y.states
    else:
        resident, swap = x.resident + y.resident, x.swap + y.swap
        peak = max(x.peak + y.resident, x.resident + y.peak)
        switching, host = 0.0, max(x.host, y.host)
    states = x.states + y.states
    for where in tree.bound:
        if where.held:
            share, seconds, size = problem.state(where.worker, where.lanes, where.kind)
            resident, peak, swap = resident + share, peak + share, swap + seconds
            states += size * where.replicas * where.lanes
    first = x.first + y.first + switching
    terms = a.first + b.first + Terms(switching=switching)
    cost = Cost(
        first,
        first,
        resident,
        peak,
        swap,
        x.publishing + y.publishing,
        max(x.cores, y.cores),
        host,
        states,
    )
    return _publishing(problem, tree, Priced(cost, terms, terms), parts[0], "same", parts[1])


def _spatial(
    problem: Problem,
    tree: Spatial,
    lanes: Lanes,
    round_size: int,
    chunk: int,
    bound: dict[str, Bound],
) -> Priced:
    parts = mask(tree.first), mask(tree.second)
    for worker, tasks in problem.tasks_of.items():
        apart = tasks & parts[0] and tasks & parts[1]
        if apart or (worker in bound and tasks & (parts[0] | parts[1])):
            raise Infeasible("a worker stands in two places", key=worker)
    for mine, other, there in zip(tree.first_lanes, tree.second_lanes, lanes, strict=True):
        if mine + other > there:
            raise Infeasible("takes more lanes than it has", value=mine + other)
    a = _price(problem, tree.first, tree.first_lanes, round_size, chunk, {})
    b = _price(problem, tree.second, tree.second_lanes, round_size, chunk, {})
    x, y = a.cost, b.cost
    joined, size = problem.crossing(*parts)
    if problem.crossing(parts[1], parts[0])[0]:
        raise Infeasible("the second part makes what the first reads")
    totals = sum(tree.first_lanes), sum(tree.second_lanes)
    link = problem.link_seconds(size * chunk, *totals)
    slow = a if x.period >= y.period else b
    if joined:
        first, period = x.first + y.first + link, max(x.period, y.period, link)
        fill = Terms(waiting=(b if slow is a else a).first.total)
        terms = slow.first + fill + Terms(links=link)
        between = slow.period if period > link else Terms(links=link)
    else:
        first, period = max(x.first, y.first), max(x.period, y.period)
        terms = (a if x.first >= y.first else b).first
        between = slow.period
    cost = Cost(
        first,
        period,
        max(x.resident, y.resident),
        max(x.peak, y.peak),
        max(x.swap, y.swap),
        x.publishing + y.publishing,
        x.cores + y.cores,
        x.host + y.host,
        x.states + y.states,
    )
    priced = Priced(cost, terms, between)
    return _publishing(problem, tree, priced, parts[0], problem.place(sum(totals)), parts[1])


def _publishing(
    problem: Problem, tree: Tree, priced: Priced, first: int, place: str, second: int = 0
) -> Priced:
    """Add the weight edges whose ends come together at this node."""
    inner = edges_within(problem, first) + edges_within(problem, second)
    layouts, seconds = edge_layouts(problem, tree), 0.0
    for edge in edges_within(problem, mask(tree)):
        if edge in inner:
            continue
        (source, kind), (target, other) = layouts[edge.source], layouts[edge.target]
        if place == "same" and kind == other and isinstance(tree, Temporal):
            together = (
                problem.state(edge.source, source, kind)[0]
                + problem.state(edge.target, target, other)[0]
            )
            if together > 1:
                raise Infeasible("weights do not fit beside those they replace", key=edge.target)
        seconds += problem.profile.publish_seconds(edge.source, edge.target, place, source, target)
    cost = priced.cost._replace(publishing=priced.cost.publishing + seconds)
    return Priced(cost, priced.first, priced.period)


def _steps(problem: Problem, tree: Steps) -> Priced:
    everything = int(problem.num_items)
    used = [sum(counts) for counts in zip(*tree.lanes, strict=True)]
    if any(mine > there for mine, there in zip(used, problem.lanes, strict=True)):
        raise Infeasible("takes more lanes than it has", value=used)
    parts = [mask(part) for part in tree.parts]
    for tasks in problem.tasks_of.values():
        if sum(1 for part in parts if part & tasks) > 1:
            raise Infeasible("a worker stands in two places")
    priced = [
        _price(problem, part, lanes, everything, everything, {})
        for part, lanes in zip(tree.parts, tree.lanes, strict=True)
    ]
    slow = max(priced, key=lambda part: part.cost.first)
    link = 0.0
    for n in range(1, len(parts)):
        _, size = problem.crossing(parts[n - 1], sum(parts[n:]))
        after = sum(sum(lanes) for lanes in tree.lanes[n:])
        link = max(link, problem.link_seconds(size * everything, sum(tree.lanes[n - 1]), after))
    inner = [edge for part in parts for edge in edges_within(problem, part)]
    layouts = edge_layouts(problem, tree)
    seconds = sum(
        problem.profile.publish_seconds(
            edge.source,
            edge.target,
            problem.place(sum(used)),
            layouts[edge.source][0],
            layouts[edge.target][0],
        )
        for edge in problem.weight_edges
        if edge not in inner
    )
    cost = Cost(
        max(slow.cost.first, link),
        0.0,
        max(part.cost.resident for part in priced),
        max(part.cost.peak for part in priced),
        max(part.cost.swap for part in priced),
        sum(part.cost.publishing for part in priced) + seconds,
        sum(part.cost.cores for part in priced),
        sum(part.cost.host for part in priced),
        sum(part.cost.states for part in priced),
    )
    check_limits(problem, cost)
    terms = slow.first if slow.cost.first >= link else Terms(links=link)
    return Priced(cost, terms, Terms())
