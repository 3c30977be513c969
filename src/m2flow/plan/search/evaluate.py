"""The cost of one given plan tree: the words of `tree`, written out once.

The search never calls this to compare plans; it says what the chosen plan's seconds are made of,
and is what brute force over all trees adds up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from m2flow.plan.search.combine import Held, apart, in_turn, pipelined
from m2flow.plan.search.leaves import layout_of, leaf_cost
from m2flow.plan.search.pricing import Infeasible, Priced, Terms, check_limits
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
from m2flow.plan.search.weights import (
    edges_within,
    fit_together,
    meeting,
    seconds_of,
)


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
            error, each = within.first_error, within.period_error
            return Priced(
                cost,
                terms,
                within.period.times(count),
                error + (count - 1) * each,
                count * each,
            )
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
    used, gangs, error = [0] * len(lanes), set(), 0.0
    for node, number, count in zip(problem.tasks[leaf.task].nodes, numbers, replicas, strict=True):
        layout, kind = layout_of(problem, node, number)
        gangs.add((layout.lanes, kind))
        error = max(error, layout.error)
        used[kind] = count * layout.lanes + (used[kind] if isinstance(leaf, Split) else 0)
        where, here = bound.get(node.worker), (layout.lanes, kind, count)
        if where and (isinstance(leaf, Split) or (where.lanes, where.kind, where.replicas) != here):
            raise Infeasible("a worker stands in two places", key=node.worker)
    if isinstance(leaf, Fused) and len(gangs) > 1:
        raise Infeasible("a fused cycle has one layout", value=sorted(gangs))
    if any(mine > there for mine, there in zip(used, lanes, strict=True)):
        raise Infeasible("takes more lanes than it has", value=used)
    return Priced(
        cost, Terms(cost.first), Terms(cost.period), error * cost.first, error * cost.period
    )


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
    switching = x.swap + y.swap if tree.switched else 0.0
    cost = in_turn(x, y, 0.0, tree.switched, _held(problem, tree))
    terms = a.first + b.first + Terms(switching=switching)
    error = math.hypot(a.first_error, b.first_error)
    priced = Priced(cost, terms, terms, error, error)
    return _publishing(problem, tree, priced, parts[0], "same", parts[1])


def _held(problem: Problem, tree: Temporal) -> Held:
    resident, swap, states = 0.0, 0.0, 0.0
    for where in tree.bound:
        if where.held:
            share, seconds, size = problem.state(where.worker, where.lanes, where.kind)
            resident, swap = resident + share, swap + seconds
            states += size * where.replicas * where.lanes
    return Held(resident, swap, states)


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
        torn = tasks & parts[0] and tasks & parts[1]
        if torn or (worker in bound and tasks & (parts[0] | parts[1])):
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
    first, period = pipelined(x, y, joined, link)
    between, error = slow.period, slow.period_error
    if joined:
        fill = Terms(waiting=(b if slow is a else a).first.total)
        terms = slow.first + fill + Terms(links=link)
        first_error = math.hypot(a.first_error, b.first_error)
        if link >= slow.cost.period:
            between, error = Terms(links=link), 0.0
    else:
        later = a if x.first >= y.first else b
        terms, first_error = later.first, later.first_error
    priced = Priced(apart(x, y, first, period, 0.0), terms, between, first_error, error)
    return _publishing(problem, tree, priced, parts[0], problem.place(sum(totals)), parts[1])


def _publishing(
    problem: Problem, tree: Tree, priced: Priced, first: int, place: str, second: int = 0
) -> Priced:
    """Add the weight edges whose ends come together at this node."""
    layouts, seconds = edge_layouts(problem, tree), 0.0
    edges = meeting(problem, first, second) if second else edges_within(problem, mask(tree))
    for edge in edges:
        if isinstance(tree, Temporal) and not fit_together(problem, edge, layouts):
            raise Infeasible("weights do not fit beside those they replace", key=edge.target)
        seconds += seconds_of(problem, edge, place, layouts)
    cost = priced.cost._replace(publishing=priced.cost.publishing + seconds)
    return replace(priced, cost=cost)


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
        seconds_of(problem, edge, problem.place(sum(used)), layouts)
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
    return Priced(cost, terms, Terms(), slow.first_error if slow.cost.first >= link else 0.0)
