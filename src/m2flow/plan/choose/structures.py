"""Where a choice begins: every way in which workers can stand together or apart.

A *structure* deals the workers of a kind of lane out to blocks, which have lanes of their own; the
workers of one block may instead stand on all lanes. Six workers have some hundreds of structures.
The lanes are dealt to the blocks by the work of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import ceil, inf

from m2flow.flow.graph import SOURCE, StageNode
from m2flow.plan.choose.draft import Draft, Spot, units_of_call
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.chunks import PIECES
from m2flow.plan.profile import WorkerCost

EVERYWHERE = -1
"""The block of the workers that stand on all lanes."""

MOST_APART = 6
"""So many workers of a kind, those with most work, are dealt out freely; each other one stands
where the worker does whose outputs it reads."""

LIGHT = 0.01
"""A worker with less than this share of the work is not dealt out freely either."""

FINENESS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Calls a replica and window that are compared for a stage by itself."""

CHEAPER = 0.03
"""Relative seconds that more calls must save a stage by itself."""


def starts(problem: PlanningProblem, staleness: int = 0, spare: int = 0) -> Iterator[Draft]:
    """Drafts of every structure that memory allows.

    Args:
        problem: what is planned.
        staleness: of the drafts.
        spare: lanes of each kind that are not used, if it has more.
    """
    dealt = with_work(problem)
    each = (_kinds(problem, worker, worker in dealt) for worker in range(len(problem.workers)))
    for kinds in product(*each):
        by_kind = {
            kind: [n for n, mine in enumerate(kinds) if mine == kind]
            for kind in problem.ids
            if kind in kinds
        }
        parts = [
            list(_standing(problem, kind, mine, max(1, len(problem.ids[kind]) - spare), dealt))
            for kind, mine in by_kind.items()
        ]
        for chosen in product(*parts):
            spots = {worker: spot for part in chosen for worker, spot in part.items()}
            yield from cut(problem, tuple(spots[n] for n in range(len(kinds))), staleness)


def _kinds(problem: PlanningProblem, worker: int, dealt: bool) -> list[str]:
    """The kinds of lanes on which a worker may begin; a light one, where it has least work."""
    known = sorted({option.kind for option in problem.options[problem.workers[worker]]})
    if dealt:
        return known
    fits = [
        kind
        for kind in known
        if problem.kept(best_option, worker, kind, len(problem.ids[kind]), True) is not None
    ]
    return [min(fits or known, key=lambda kind: work_seconds(problem, worker, kind))]


def _standing(
    problem: PlanningProblem,
    kind: str,
    workers: Sequence[int],
    lanes: int,
    dealt: Sequence[int],
) -> Iterator[dict[int, Spot]]:
    """Where the workers of a kind may stand, on so many lanes."""
    work = {worker: work_seconds(problem, worker, kind) for worker in workers if worker in dealt}
    free = sorted(sorted(work, key=lambda worker: -work[worker])[:MOST_APART])
    for blocks in _partitions(len(free)):
        block_of = dict(zip(free, blocks, strict=True))
        for worker in workers:  # in the order of the flow
            if worker not in block_of:
                block_of[worker] = _beside(problem, worker, block_of)
        rest, *parts = (
            [worker for worker in workers if block_of[worker] == block]
            for block in sorted({EVERYWHERE, *block_of.values()})
        )
        leanest = (False,) if problem.memory[kind] is None else (False, True)
        for deal, lean in product(_deals(problem, kind, parts, lanes), leanest):
            spots = _spots(problem, kind, parts, deal, lean)
            everywhere = _spots(problem, kind, [rest], [lanes], lean)
            if spots is not None and everywhere is not None:
                yield spots | everywhere


def _partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Every block of each worker: all everywhere, or two blocks and more."""

    def longer(done: tuple[int, ...], blocks: int) -> Iterator[tuple[int, ...]]:
        if len(done) == count:
            if blocks != 1:
                yield done
            return
        for block in range(EVERYWHERE, blocks + 1):
            yield from longer((*done, block), max(blocks, block + 1))

    yield from longer((), 0)


def _beside(problem: PlanningProblem, worker: int, block_of: dict[int, int]) -> int:
    """Return the block of the worker whose outputs a light worker reads; EVERYWHERE if unknown."""
    nodes, own = problem.graph.nodes, problem.nodes_of[problem.workers[worker]]
    inputs = (producer for node in own for producer in node.inputs if producer != SOURCE)
    makers = (problem.number[nodes[producer].worker] for producer in inputs)
    return next((block_of[maker] for maker in makers if maker in block_of), EVERYWHERE)


def with_work(problem: PlanningProblem) -> list[int]:
    """Return the workers that are not light, on the lanes where each has least work."""
    each = [
        min(
            work_seconds(problem, n, kind)
            for kind in sorted({x.kind for x in problem.options[name]})
        )
        for n, name in enumerate(problem.workers)
    ]
    return [n for n, work in enumerate(each) if work >= LIGHT * sum(each)]


def work_seconds(problem: PlanningProblem, worker: int, kind: str) -> float:
    """Seconds of lanes that a worker's stages take a step, in its cheapest layout."""
    options = [x for x in problem.options[problem.workers[worker]] if x.kind == kind]
    return min(_lane_seconds(problem, worker, option, 1) for option in options)


def _lane_seconds(
    problem: PlanningProblem, worker: int, option: WorkerCost, replicas: int
) -> float:
    total = 0.0
    for node in problem.nodes_of[problem.workers[worker]]:
        running = _least_limit(problem, node, option)
        window = problem.windows[node.index]
        share = max(1, -(-window // replicas))
        seconds = problem.call_seconds(node, option, running, share)
        finish = problem.cost(node, option, running).finish_seconds(replicas)
        each = min(replicas, window) * seconds + (replicas * finish if node.has_finish else 0.0)
        total += node.minibatches * problem.turns(node) * each * option.lanes
    return total


def _deals(
    problem: PlanningProblem, kind: str, parts: Sequence[Sequence[int]], lanes: int
) -> Iterator[list[int]]:
    """Yield the lanes of each block: one by one to the block with the most work a lane, then with
    a few lanes moved."""
    least = [
        max(
            min(o.lanes for o in problem.options[problem.workers[n]] if o.kind == kind)
            for n in part
        )
        for part in parts
    ]
    if sum(least) > lanes:
        return
    if not parts:
        yield []
        return
    work = [sum(work_seconds(problem, n, kind) for n in part) for part in parts]
    deal = list(least)
    for _ in range(lanes - sum(deal)):
        deal[max(range(len(deal)), key=lambda n: work[n] / deal[n])] += 1
    yield deal
    step = max(1, lanes // 16)
    for giver, taker in permutations(range(len(deal)), 2):
        if deal[giver] - step >= least[giver]:
            other = list(deal)
            other[giver] -= step
            other[taker] += step
            yield other


def _spots(
    problem: PlanningProblem,
    kind: str,
    parts: Sequence[Sequence[int]],
    deal: Sequence[int],
    lean: bool,
) -> dict[int, Spot] | None:
    """Each worker in its best layout on the lanes of its block; None if one has none there.

    Args:
        problem, kind, parts, deal: the blocks of a kind, and the lanes of each.
        lean: whether the best layout is that with the smallest state, not the fastest.
    """
    found, first = {}, 0
    for part, lanes in zip(parts, deal, strict=True):
        for worker in part:
            option = problem.kept(best_option, worker, kind, lanes, lean)
            if option is None:
                return None
            found[worker] = Spot(option, first, lanes // option.lanes)
        first += lanes
    return found


def best_option(
    problem: PlanningProblem, worker: int, kind: str, lanes: int, lean: bool
) -> WorkerCost | None:
    """The layout in which a worker is done first on so many lanes, among those that fit there.

    With `lean`, among those whose state is smallest.
    """
    name, limit = problem.workers[worker], problem.memory[kind]

    def working(option: WorkerCost) -> int:
        """What the smallest calls that are tried take on a lane."""
        sizes = []
        for node in problem.nodes_of[name]:
            chunk = units_of_call(problem.windows[node.index], lanes // option.lanes, FINENESS[-1])
            running = _least_limit(problem, node, option)
            sizes.append(problem.working_bytes(node, option, running, chunk))
        return max(sizes)

    fitting = [
        x
        for x in problem.options[name]
        if x.kind == kind and x.lanes <= lanes
        if limit is None or x.state_bytes + working(x) <= limit
    ]
    if lean and fitting:
        least = min(option.state_bytes for option in fitting)
        fitting = [option for option in fitting if option.state_bytes == least]
    return min(
        fitting,
        key=lambda x: _lane_seconds(problem, worker, x, lanes // x.lanes) / (lanes // x.lanes),
        default=None,
    )


def _least_limit(problem: PlanningProblem, node: StageNode, option: WorkerCost) -> int | None:
    """None where the stage has a price without a limit, else the largest limit that has one."""
    limits = running_limits(problem, node, option)
    return None if None in limits else max(limit for limit in limits if limit is not None)


def running_limits(
    problem: PlanningProblem, node: StageNode, option: WorkerCost
) -> set[int | None]:
    """The running limits for which a streaming stage has prices in a layout."""
    own = problem.profile.stage(node.name)
    return {x.max_running for x in own.costs_in(option.layout, option.lanes, option.kind)}


def cut(problem: PlanningProblem, spots: tuple[Spot, ...], staleness: int) -> Iterator[Draft]:
    """The draft in calls as large as can be, and in a pipeline."""
    for pipelined in (False, True):
        pieces, running, finer = [], [], False
        for node in problem.graph.nodes:
            spot = spots[problem.number[node.worker]]
            limit = _least_limit(problem, node, spot.option)
            calls = 1.0
            # Whether the stage can be at work while one that it reads from, or a reader of it, is.
            apart = any(spots[near].lanes != spot.lanes for near in problem.near[node.index])
            if pipelined and apart and not node.streaming and node.unit != "step":
                calls = float(max(1, PIECES // node.minibatches))
                finer = finer or calls > 1
            asked = node.index, spot.option, spot.replicas, limit, calls
            pieces.append(problem.kept(_fine_enough, *asked))
            running.append(limit)
        if pipelined and not finer:
            return
        yield Draft(spots, tuple(pieces), tuple(running), pipelined, True, staleness)


def _fine_enough(
    problem: PlanningProblem,
    stage: int,
    option: WorkerCost,
    replicas: int,
    running: int | None,
    calls: float,
) -> float:
    """Return how many calls to make a replica and window: `calls`, or more where memory needs it
    or they cost less."""
    node, window = problem.graph.nodes[stage], problem.windows[stage]
    limit = problem.memory[option.kind]
    best, least = FINENESS[-1], inf
    for finer in (calls, *(n for n in FINENESS if n > calls)):
        chunk = units_of_call(window, replicas, finer)
        size = problem.working_bytes(node, option, running, chunk)
        rounds = ceil(ceil(window / chunk) / replicas)
        seconds = rounds * problem.call_seconds(node, option, running, chunk)
        fits = limit is None or option.state_bytes + size <= limit
        if fits and seconds < least * (1 - CHEAPER):
            best, least = finer, seconds
        if chunk == 1:
            break
    return best
