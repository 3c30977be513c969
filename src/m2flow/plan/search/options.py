"""The ways to lay out a leaf: layouts, replicas and calls of a stage; the same for a cycle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from m2flow.flow.graph import StageNode
from m2flow.plan.profile import StageCost
from m2flow.plan.search.leaves import layout_of, segments, units
from m2flow.plan.search.menus import replica_counts
from m2flow.plan.search.problem import Lanes, Problem
from m2flow.plan.search.tree import Bound, Fused, Leaf, Split
from m2flow.plan.search.weights import Allowed

AnyLeaf = Leaf | Fused | Split
Places = Mapping[str, Bound]
"""Where bound workers stand."""


def leaf_options(
    problem: Problem,
    given: Allowed,
    index: int,
    lanes: Lanes,
    round_size: int,
    chunk: int,
    places: Places,
) -> Iterator[AnyLeaf]:
    """Ways to run a task on so many lanes.

    Args:
        problem: what is searched.
        given: layouts that some workers are kept to.
        index: of the task.
        lanes: what there is.
        round_size, chunk: R and m, in source items.
        places: where bound workers stand.
    """
    if problem.tasks[index].is_loop:
        return _loop(problem, given, index, lanes, chunk, places)
    return _stage(problem, given, index, lanes, round_size, chunk, places)


def lanes_of(problem: Problem, leaf: AnyLeaf) -> Lanes:
    """How many lanes of each kind a leaf has."""
    nodes, counts = problem.tasks[leaf.task].nodes, [0] * len(problem.kinds)
    layouts = (leaf.layout,) if isinstance(leaf, Leaf) else leaf.layouts
    replicas = leaf.replicas if isinstance(leaf, Split) else (leaf.replicas,)
    placed = zip(nodes, layouts, replicas, strict=False)  # of a fused cycle the first for all
    for node, number, count in placed:
        layout, kind = layout_of(problem, node, number)
        counts[kind] += count * layout.lanes
    return tuple(counts)


def _allowed(given: Allowed, node: StageNode, lanes: int, kind: int) -> bool:
    return node.worker not in given or (lanes, kind) in given[node.worker]


def _stage(
    problem: Problem,
    given: Allowed,
    index: int,
    lanes: Lanes,
    round_size: int,
    chunk: int,
    places: Places,
) -> Iterator[AnyLeaf]:
    node = problem.tasks[index].nodes[0]
    where = places.get(node.worker)
    window = int(problem.num_items) // node.minibatches
    count = units(node, round_size if node.streaming else min(chunk, window))[0]
    for number, layout, kind in problem.layouts(node):
        if not _allowed(given, node, layout.lanes, kind):
            continue
        most = lanes[kind] // layout.lanes
        if where is not None:
            if (where.lanes, where.kind) != (layout.lanes, kind) or where.replicas > most:
                continue
            replicas: Iterable[int] = (where.replicas,)
        else:
            replicas = replica_counts(count, most)
        calls = problem.calls if layout.working and not node.streaming else (1,)
        for number_of in replicas:
            for cut in calls:
                yield Leaf(index, number, number_of, cut)


def _loop(
    problem: Problem, given: Allowed, index: int, lanes: Lanes, chunk: int, places: Places
) -> Iterator[AnyLeaf]:
    nodes = problem.tasks[index].nodes
    menus = [
        [entry for entry in problem.layouts(n) if _allowed(given, n, entry[1].lanes, entry[2])]
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
            replicas = _loop_counts(problem, index, items, (1,), most)
            if wheres:
                same = {(w.lanes, w.kind, w.replicas) for w in wheres}
                count = wheres[0].replicas
                fits = same == {(gang, kind, count)} and count <= most
                replicas = (count,) if fits else ()
            for count in replicas:
                yield Fused(index, numbers, count)
        if not wheres and len({n.worker for n in nodes}) == len(nodes):
            for counts_of in _loop_replicas(problem, index, combination, lanes, items):
                for groups in problem.groups:
                    yield Split(index, numbers, counts_of, groups)


def _loop_counts(
    problem: Problem, index: int, items: int, groups: tuple[int, ...], most: int
) -> tuple[int, ...]:
    """Replicas of a cycle's member: what helps while all items are in it, or fewer."""
    numbers: set[int] = set()
    for _, share in segments(problem, index):
        for parts in groups:
            active = max(1, round(items * share))
            numbers.update(replica_counts(-(-active // parts), most))
    return tuple(sorted(numbers))


def _loop_replicas(
    problem: Problem,
    index: int,
    combination: tuple[tuple[int, StageCost, int], ...],
    lanes: Lanes,
    items: int,
) -> Iterator[tuple[int, ...]]:
    """Replicas of members that stand apart, within the lanes there are."""
    if not combination:
        yield ()
        return
    _, layout, kind = combination[0]
    gang = layout.lanes
    for count in _loop_counts(problem, index, items, problem.groups, lanes[kind] // gang):
        left = tuple(n - count * gang * (k == kind) for k, n in enumerate(lanes))
        for rest in _loop_replicas(problem, index, combination[1:], left, items):
            yield (count, *rest)
