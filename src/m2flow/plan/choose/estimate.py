"""`estimate`: about how long a step of a draft takes, without the engine.

It only says which drafts are worth simulating, and in which order. The calls of one stage after the
other are laid out on the replica that is free first, and begin when their inputs are there, which
come evenly from the first to the last output of the stages before.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import log, sqrt
from typing import NamedTuple

from m2flow.flow.graph import SOURCE, StageNode
from m2flow.plan.choose.draft import Draft, Spot, chunk_of, spot_of, stretches
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.profile import StageCost, WorkerCost

MANY = 24
"""Calls of a window that are laid out one by one."""

EARLY = 0.1
"""Share of a streaming call after which its first outputs are out."""


class _StageSeconds(NamedTuple):
    """Seconds of a stage.

    Attributes:
        calls: of each call of a window.
        finish: of the `finish` of a mini-batch.
        even: of a step on one replica, if all replicas could share the calls evenly.
    """

    calls: tuple[float, ...]
    finish: float
    even: float


def estimate(problem: PlanningProblem, draft: Draft) -> float:
    """About how many seconds a step takes."""
    free = {kind: [(0.0, 0.0)] * len(ids) for kind, ids in problem.ids.items()}
    first: dict[int, float] = {SOURCE: 0.0}
    last: dict[int, float] = {SOURCE: 0.0}
    busy = [0.0] * len(draft.spots)
    for node in problem.graph.nodes:
        spot, running = spot_of(problem, draft, node), draft.running[node.index]
        asked = node.index, spot.option, spot.replicas, chunk_of(problem, draft, node), running
        work = problem.kept(_stage_seconds, *asked)
        arrival = max(first[x] for x in node.inputs), max(last[x] for x in node.inputs)
        begin, end = _scheduled(problem, node, spot, work, free[spot.option.kind], arrival)
        if node.streaming:
            begin -= work.calls[0] * (1 - EARLY)
        first[node.index], last[node.index] = begin, end
        busy[problem.number[node.worker]] += work.even
    about = max(last.values())
    if draft.staleness:
        about = max(about / (1 + draft.staleness), _load(draft, busy))
    return about + _publishing(problem, draft) + _switching(problem, draft)


def _scheduled(
    problem: PlanningProblem,
    node: StageNode,
    spot: Spot,
    work: _StageSeconds,
    free: list[tuple[float, float]],
    arrival: tuple[float, float],
) -> tuple[float, float]:
    """When a stage's first call ends and when its last one does; its lanes are taken until then.

    Args:
        problem, node, spot, work: what runs where.
        free: the moment from which on each lane of the kind has nothing to do, and how long it
            waited for inputs before that: calls of later stages go there.
        arrival: when the first inputs come, and when the last ones do.
    """
    size, turns = spot.option.lanes, problem.turns(node)
    lows = range(spot.first, spot.end, size)
    latest = free[spot.first : spot.end] if size == 1 else [max(free[x : x + size]) for x in lows]
    replicas = [(moment, waited, low) for (moment, waited), low in zip(latest, lows, strict=True)]
    early, late = arrival
    step = (late - early) / (node.minibatches * len(work.calls))
    begin = end = 0.0
    for _ in range(node.minibatches):
        heapify(replicas)
        for seconds in work.calls:
            moment, waited, low = replicas[0]
            early += step
            length = turns * seconds
            # Compared by hand: calls of `min` and `max` made the search a twentieth slower.
            if moment > early:
                inside = waited if waited < length else length
                if moment - inside < early:
                    inside = moment - early
                done = moment = moment - inside + length
                waited -= inside
            else:
                waited += early - moment if moment else 0.0
                done = moment = early + length
            heapreplace(replicas, (moment, waited, low))
            begin = begin or done
            end = done if done > end else end
        if work.finish:
            end += work.finish
            replicas = [(end, waited + end - moment, low) for moment, waited, low in replicas]
    for moment, waited, low in replicas:
        free[low : low + size] = [(moment, waited)] * size
    return begin, end


def _load(draft: Draft, busy: Sequence[float]) -> float:
    """Seconds of work that some lanes have, which nobody else could do, for each of them."""
    most = 0.0
    for kind, first, end in {spot.lanes for spot in draft.spots}:
        inside = (
            seconds * (spot.end - spot.first)
            for spot, seconds in zip(draft.spots, busy, strict=True)
            if spot.option.kind == kind and spot.first >= first and spot.end <= end
        )
        most = max(most, sum(inside) / (end - first))
    return most


def _stage_seconds(
    problem: PlanningProblem,
    stage: int,
    option: WorkerCost,
    replicas: int,
    chunk: int,
    running: int | None,
) -> _StageSeconds:
    node, window = problem.graph.nodes[stage], problem.windows[stage]
    cost = problem.cost(node, option, running)
    full, rest = divmod(window, chunk)
    sizes = [chunk] * full + [rest] * min(rest, 1)
    if running is not None:  # fed: each replica holds as much as it may all the time
        sizes = [-(-window // replicas)] * min(replicas, window)
    seconds = {n: problem.call_seconds(node, option, running, n) for n in set(sizes)}
    calls = tuple(seconds[size] for size in sizes)
    rounds = -(-len(calls) // replicas)
    lumps = max(1, MANY // replicas)
    if rounds > lumps:  # calls one after another are taken for fewer longer ones
        calls = (sum(calls) / replicas / lumps,) * (lumps * replicas)
    finish = float(cost.finish_seconds(replicas)) if node.has_finish else 0.0
    calls = (*calls[:-1], max(calls[-1], _longest(problem, node, cost, replicas, calls[-1])))
    even = node.minibatches * (problem.turns(node) * sum(calls) / replicas + finish)
    return _StageSeconds(calls, finish, even)


def _longest(
    problem: PlanningProblem, node: StageNode, cost: StageCost, replicas: int, seconds: float
) -> float:
    """Seconds of the longest call of a window, of which others take so many seconds."""
    count = problem.windows[node.index] * problem.unit_items[node.index]
    lengths = problem.profile.stage(node.name).lengths
    if cost.round is not None and lengths is not None:
        each = max(1.0, count * node.expands / replicas)
        pace = cost.round.at(min(each, cost.slots or each) / 2)
        return pace * lengths.at(1 - 0.5 / (count * node.expands))
    deviation = cost.spread * sqrt(2 * log(replicas) * replicas / count)
    return seconds * (1 + min(1.0, deviation))


def _publishing(problem: PlanningProblem, draft: Draft) -> float:
    most = 0.0
    for source, target in problem.weight_edges:
        one, other = draft.spots[source], draft.spots[target]
        lanes, kinds = (one.option.lanes, other.option.lanes), (one.option.kind, other.option.kind)
        same = kinds[0] == kinds[1] and one.first <= other.first and other.end <= one.end
        edge = problem.workers[source], problem.workers[target], "same" if same else "node"
        most = max(most, problem.profile.publish_seconds(*edge, *lanes, kinds))
    return most


def _switching(problem: PlanningProblem, draft: Draft) -> float:
    """Seconds in which a lane brings and takes away states that do not fit on it together."""
    most = 0.0
    if any(limit is not None for limit in problem.memory.values()):
        for workers in stretches(problem, draft):
            here = [draft.spots[worker].option for worker in workers]
            limit = problem.memory[here[0].kind] if here else None
            if limit is not None and sum(option.state_bytes for option in here) > limit:
                most = max(most, sum(option.onload + option.offload for option in here))
    return most
