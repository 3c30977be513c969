"""What a leaf of a plan tree costs: a stage or a cycle, as `tree` says it.

This is the one place where a profile's curves are read for the search; everything above adds and
compares.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import pairwise

from m2flow.flow.graph import StageNode
from m2flow.plan.profile import Piecewise, StageCost
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.tree import Cost, Fused, Leaf, Split
from m2flow.plan.units import Items

NOBODY: frozenset[str] = frozenset()


def leaf_cost(
    problem: Problem,
    leaf: Leaf | Fused | Split,
    round_size: int,
    chunk: int,
    held: Collection[str] = NOBODY,
) -> Cost | None:
    """The cost of a leaf.

    Args:
        problem: what is planned.
        leaf: how it is laid out.
        round_size, chunk: R and m, in source items.
        held: workers whose state somebody above counts.

    Returns:
        The cost, or None if the stage cannot work on such chunks.
    """
    match leaf:
        case Leaf():
            return _stage(problem, leaf, round_size, chunk, held)
        case Fused():
            return _fused(problem, leaf, chunk, held)
        case Split():
            return _split(problem, leaf, chunk, held)


def layout_of(problem: Problem, node: StageNode, number: int) -> tuple[StageCost, int]:
    """A layout by its number, and its kind of lane."""
    layout = problem.profile.stage(node.name).costs[number]
    return layout, problem.kinds.index(layout.kind)


def units(node: StageNode, source_items: int) -> tuple[int, int]:
    """Units that so many source items are for a stage, and the items of one."""
    items = source_items * node.fanout
    unit_items = {"item": 1, "group": node.group_size, "step": items}[node.unit]
    return items // unit_items, unit_items


def share_of(node: StageNode, source_items: int, replicas: int) -> tuple[int, int]:
    """Units of the busiest replica, and the items of one."""
    count, unit_items = units(node, source_items)
    return -(-count // replicas), unit_items


def _stage(
    problem: Problem, leaf: Leaf, round_size: int, chunk: int, held: Collection[str]
) -> Cost | None:
    node = problem.tasks[leaf.task].nodes[0]
    layout, kind = layout_of(problem, node, leaf.layout)
    if node.unit == "step" and chunk != problem.num_items:
        return None
    if node.streaming:
        first, period, items = _streamed(problem, node, layout, leaf.replicas, round_size, chunk)
    else:
        window = problem.num_items // node.minibatches
        if chunk % window and window % chunk:
            return None
        count, unit_items = share_of(node, min(window, chunk), leaf.replicas)
        if leaf.calls > count:
            return None
        items = Items(-(-count // leaf.calls) * unit_items)
        dispatch = problem.profile.dispatch
        first = max(1, chunk // window) * leaf.calls * (dispatch + layout.call(items))
        if node.has_finish:
            first += chunk / window * (dispatch + layout.finish_seconds(leaf.replicas))
        period = first
    working = problem.share(layout.working_bytes(items), kind)
    resident, swap, size = 0.0, 0.0, 0
    if node.worker not in held:
        resident, swap, size = problem.state(node.worker, layout.lanes, kind)
    return Cost(
        first,
        period,
        resident,
        resident + working,
        swap,
        0.0,
        layout.cores * leaf.replicas,
        float(layout.host_bytes * leaf.replicas),
        float(size * leaf.replicas * layout.lanes),
    )


def _streamed(
    problem: Problem,
    node: StageNode,
    layout: StageCost,
    replicas: int,
    round_size: int,
    chunk: int,
) -> tuple[float, float, Items]:
    """First chunk and period of a streaming stage, and the items it holds at once."""
    items = Items(-(-round_size * node.fanout // replicas))
    call, chunks, dispatch = layout.call(items), round_size // chunk, problem.profile.dispatch
    if chunks == 1 or layout.done is None:
        return dispatch + call, 0.0 if chunks > 1 else dispatch + call, items
    first = call * _first_share(layout.done, chunks)
    return dispatch + first, (call - first) / (chunks - 1), items


@cache
def _first_share(done: Piecewise, chunks: int) -> float:
    """Share of a streaming call after which its first chunk is out, as the line above all says."""
    return max(
        (done.at(j / chunks) - (j - 1) / (chunks - 1)) * (chunks - 1) / (chunks - j)
        for j in range(1, chunks)
    )


def segments(problem: Problem, task: int) -> list[tuple[float, float]]:
    """A cycle's turns as (turns, share of the items that are still in it)."""
    first = problem.tasks[task].nodes[0]
    turns = problem.profile.stage(first.name).turns
    if turns is None:
        loop = None if first.loop is None else problem.graph.loops[first.loop]
        return [(float(loop.max_turns or 1) if loop else 1.0, 1.0)]
    values = (0.0, *turns.values)
    count = len(turns.values) - 1
    return [
        (high - low, 1.0 if n == 0 else 1.0 - (n - 1) / count)
        for n, (low, high) in enumerate(pairwise(values))
        if high > low
    ]


def _fused(problem: Problem, leaf: Fused, chunk: int, held: Collection[str]) -> Cost:
    nodes = problem.tasks[leaf.task].nodes
    layouts = [layout_of(problem, n, at) for n, at in zip(nodes, leaf.layouts, strict=True)]
    seconds, dispatch = 0.0, problem.profile.dispatch
    for turns, share in segments(problem, leaf.task):
        active = max(1, round(chunk * nodes[0].fanout * share))
        items = Items(-(-active // leaf.replicas))
        seconds += turns * sum(dispatch + layout.call(items) for layout, _ in layouts)
    items = Items(-(-chunk * nodes[0].fanout // leaf.replicas))
    working = max(problem.share(layout.working_bytes(items), kind) for layout, kind in layouts)
    resident, swap, size, seen = 0.0, 0.0, 0, set(held)
    for node, (layout, kind) in zip(nodes, layouts, strict=True):
        if node.worker not in seen:
            seen.add(node.worker)
            share, seconds_of_it, num_bytes = problem.state(node.worker, layout.lanes, kind)
            resident, swap, size = resident + share, swap + seconds_of_it, size + num_bytes
    return Cost(
        seconds,
        seconds,
        resident,
        resident + working,
        swap,
        0.0,
        max(layout.cores for layout, _ in layouts) * leaf.replicas,
        float(max(layout.host_bytes for layout, _ in layouts) * leaf.replicas),
        float(size * leaf.replicas * layouts[0][0].lanes),
    )


def _split(problem: Problem, leaf: Split, chunk: int, held: Collection[str]) -> Cost | None:
    nodes = problem.tasks[leaf.task].nodes
    layouts = [layout_of(problem, n, at) for n, at in zip(nodes, leaf.layouts, strict=True)]
    everything = chunk * nodes[0].fanout
    if leaf.groups > everything or any(node.worker in held for node in nodes):
        return None
    lanes = [q * lay.lanes for q, (lay, _) in zip(leaf.replicas, layouts, strict=True)]
    seconds, began = 0.0, False
    for turns, share in segments(problem, leaf.task):
        group = -(-max(1, round(everything * share)) // leaf.groups)
        parts = _visits(problem, leaf, group, layouts, lanes)
        one_by_one, together = sum(parts), leaf.groups * max(parts)
        seconds += turns * max(one_by_one, together)
        if not began:  # until every group is at work, the first time round
            seconds, began = seconds + min(one_by_one, together) - max(parts), True
    resident, peak, swap, cores, host, states = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    group = -(-everything // leaf.groups)
    for node, (layout, kind), replicas in zip(nodes, layouts, leaf.replicas, strict=True):
        share, seconds_of_it, num_bytes = problem.state(node.worker, layout.lanes, kind)
        working = layout.working_bytes(Items(-(-group // replicas)))
        resident, swap = max(resident, share), max(swap, seconds_of_it)
        peak = max(peak, share + problem.share(working, kind))
        cores += layout.cores * replicas
        host += layout.host_bytes * replicas
        states += num_bytes * replicas * layout.lanes
    return Cost(seconds, seconds, resident, peak, swap, 0.0, cores, host, states)


def _visits(
    problem: Problem,
    leaf: Split,
    group: int,
    layouts: list[tuple[StageCost, int]],
    lanes: list[int],
) -> list[float]:
    """Seconds of a group of items at each member, and on its link onwards."""
    nodes, parts = problem.tasks[leaf.task].nodes, []
    for n, (node, (layout, _)) in enumerate(zip(nodes, layouts, strict=True)):
        size = group * problem.profile.stage(node.name).output_bytes
        hop = problem.link_seconds(size, lanes[n], lanes[(n + 1) % len(lanes)])
        call = layout.call(Items(-(-group // leaf.replicas[n])))
        parts.append(problem.profile.dispatch + call + hop)
    return parts
