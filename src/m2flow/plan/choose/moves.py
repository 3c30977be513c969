"""What can be changed in a draft, one thing at a time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

from m2flow.flow.graph import StageNode
from m2flow.plan.choose.draft import Draft, Spot, chunk_of, spot_of
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.choose.structures import cut, running_limits

PIECES = (0.125, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Calls of a replica and window that are tried."""

SIZES = 3
"""So many smaller and so many larger sizes of calls are tried."""


def moves(problem: PlanningProblem, draft: Draft) -> Iterator[Draft]:
    """Every draft that differs in one thing; some of them break a limit."""
    for node in problem.graph.nodes:
        yield from _calls(problem, draft, node)
    yield from _all_calls(problem, draft)
    for worker in range(len(problem.workers)):
        for moved in _spots(problem, draft, worker):
            yield from _recut(problem, moved)
    for moved in _boundaries(problem, draft):
        yield from _recut(problem, moved)
    yield replace(draft, downstream_first=not draft.downstream_first)
    if problem.graph.loops:
        yield replace(draft, fused=not draft.fused)


def _recut(problem: PlanningProblem, moved: Draft) -> Iterator[Draft]:
    """A draft with workers on other lanes, in calls as before and in calls that suit them."""
    yield moved
    for other in cut(problem, moved.spots, moved.staleness):
        if other.downstream_first != moved.downstream_first:
            yield other


def in_groups(problem: PlanningProblem, draft: Draft) -> Draft | None:
    """The draft with two groups of items in loops that stand on the same lanes and have a stage of
    which a part passes elsewhere; None if there are none."""
    changed = draft
    for loop in problem.graph.loops:
        members = [problem.graph.nodes[index] for index in loop.members]
        if len({spot_of(problem, draft, node).lanes for node in members}) > 1:
            continue
        for node in members:
            index, spot = node.index, spot_of(problem, draft, node)
            if node.waits and problem.cost(node, spot.option, draft.running[index]).elsewhere:
                changed = changed.with_calls(index, 2 * draft.pieces[index], draft.running[index])
    return None if changed is draft else changed


# --- calls of stages ------------------------------------------------------------------------------


def _calls(problem: PlanningProblem, draft: Draft, node: StageNode) -> Iterator[Draft]:
    """A stage in larger or smaller calls, or under another running limit."""
    if node.unit == "step":
        return
    index, spot = node.index, spot_of(problem, draft, node)
    for pieces in _next_pieces(problem, draft, node):
        yield draft.with_calls(index, pieces, draft.running[index])
    if node.streaming:
        share = max(1, -(-problem.windows[index] // spot.replicas))
        known = running_limits(problem, node, spot.option)
        menu = {limit for limit in known if limit is not None}
        menu |= {2**n for n in range(share.bit_length()) if 2**n < share}
        if known == {None}:
            yield draft.with_calls(index, draft.pieces[index], None)
        limit = draft.running[index]
        ranked = sorted(menu)
        at = len(ranked) if limit is None else bisect_left(ranked, limit)
        for other in (*ranked[max(0, at - 2) : at], *ranked[at + 1 : at + 3]):
            yield draft.with_calls(index, 1.0, other)
        if None in known and limit is not None:
            yield draft.with_calls(index, 1.0, None)


def _next_pieces(problem: PlanningProblem, draft: Draft, node: StageNode) -> list[float]:
    """Numbers of calls that give the next smaller and the next larger sizes of calls."""
    mine, found = draft.pieces[node.index], list[float]()
    smaller, larger = PIECES[bisect_right(PIECES, mine) :], PIECES[: bisect_left(PIECES, mine)]
    for menu in (smaller, larger[::-1]):
        sizes = {chunk_of(problem, draft, node)}
        for pieces in menu:
            size = chunk_of(
                problem, draft.with_calls(node.index, pieces, draft.running[node.index]), node
            )
            if size not in sizes and len(sizes) <= SIZES:
                sizes.add(size)
                found.append(pieces)
    return found


def _all_calls(problem: PlanningProblem, draft: Draft) -> Iterator[Draft]:
    """All stages in calls of half or of twice the size; those of one loop alike."""
    nodes = problem.graph.nodes
    plain = [node.index for node in nodes if not node.streaming]
    together = (range(len(nodes)), plain, *(loop.members for loop in problem.graph.loops))
    for factor, some in product((2.0, 4.0, 0.5), together):
        pieces = list(draft.pieces)
        for n in some:
            pieces[n] = min(max(factor * pieces[n], PIECES[0]), PIECES[-1])
        yield replace(draft, pieces=tuple(pieces))


# --- lanes ----------------------------------------------------------------------------------------


def _spots(problem: PlanningProblem, draft: Draft, worker: int) -> Iterator[Draft]:
    """A worker on other lanes, or in another layout."""
    spot = draft.spots[worker]
    whole = {kind: (0, len(ids)) for kind, ids in problem.ids.items()}
    kind = spot.option.kind
    places = dict.fromkeys((x.first, x.end) for x in draft.spots if x.option.kind == kind)
    marks = sorted({*whole[kind], *(mark for ends in places for mark in ends)})
    found = [*places, whole[kind], *pairwise(marks)]
    for option in problem.options[problem.workers[worker]]:
        for low, high in found if option.kind == kind else [whole[option.kind]]:
            other = Spot(option, low, (high - low) // option.lanes)
            if other.replicas >= 1 and other != spot:
                yield draft.with_spot(worker, other)
    for replicas in {spot.replicas // 2, spot.replicas // 4, 1} - {0, spot.replicas}:
        yield draft.with_spot(worker, replace(spot, replicas=replicas))


def _boundaries(problem: PlanningProblem, draft: Draft) -> Iterator[Draft]:
    """All workers that end or begin at a lane moved with it; all on fewer lanes."""
    for kind, ids in problem.ids.items():
        mine = [spot for spot in draft.spots if spot.option.kind == kind]
        marks = {edge for spot in mine for edge in (spot.first, spot.end)} - {0}
        for mark in sorted(marks):
            for step in sorted({1, 2, max(1, len(ids) // 8), max(1, len(ids) // 4)}):
                for to in (mark - step, mark + step):
                    if 0 < to <= len(ids):
                        yield from _shifted(draft, kind, mark, to)


def _shifted(draft: Draft, kind: str, mark: int, to: int) -> Iterator[Draft]:
    spots = []
    for spot in draft.spots:
        first, end = spot.first, spot.end
        if spot.option.kind == kind:
            first, end = (to if edge == mark else edge for edge in (first, end))
            if end - first < spot.option.lanes:
                return
            spot = Spot(spot.option, first, (end - first) // spot.option.lanes)
        spots.append(spot)
    yield replace(draft, spots=tuple(spots))
