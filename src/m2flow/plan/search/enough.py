"""What to say where no plan keeps the limits: how many lanes would do."""

from __future__ import annotations

import math
from dataclasses import replace

from m2flow.errors import UserError
from m2flow.plan.search.leaf_states import LeafStates
from m2flow.plan.search.menus import FINE, MAX_CHUNKS, few, thinned
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.solve import Scope, Solver
from m2flow.plan.search.weights import priced_layouts

MOST_TIMES = 1024
"""Up to so many times the lanes there are it is looked for enough."""


def nothing_fits(problem: Problem) -> UserError:
    """The error for lanes that can carry no plan of a step."""
    lanes = dict(zip(problem.kinds, problem.lanes, strict=True))
    times = _enough(problem)
    if times is None:
        most = max(problem.lanes) * MOST_TIMES
        expected = f"other limits, as up to {most} lanes would not do either"
        hint = _too_large(problem) or "more memory for each lane, or layouts over several lanes"
    else:
        needed = _times(problem, times).lanes
        words = ", ".join(f"{n} {kind}" for n, kind in zip(needed, problem.kinds, strict=True))
        expected = f"at least {words}"
        hint = "more lanes, more memory for each, or layouts over several lanes"
    return UserError(
        "no plan keeps the limits of these lanes",
        key="lanes",
        value=lanes,
        expected=expected,
        hint=hint,
    )


def _enough(problem: Problem) -> int | None:
    """The smallest number of lanes, of the kind there are most of, with which there is a plan; the
    others grow in proportion. None if there is none up to MOST_TIMES."""
    low = max(problem.lanes)
    high, most = 2 * low, low * MOST_TIMES
    while not _fits(_times(problem, high)):
        if high >= most:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(_times(problem, middle)):
            high = middle
        else:
            low = middle
    return high


def _times(problem: Problem, lanes: int) -> Problem:
    most = max(problem.lanes)
    return replace(problem, lanes=tuple(-(-n * lanes // most) for n in problem.lanes))


def _fits(problem: Problem) -> bool:
    """Whether a coarse search finds a plan; on few lanes a full one."""
    chunks = tuple(int(size) for size in problem.chunks)
    for given in priced_layouts(problem):
        if sum(problem.lanes) <= FINE:
            scope = Scope(chunks)
        else:
            ends = (chunks[0], thinned(chunks, 2, MAX_CHUNKS)[-1])
            scope = Scope(tuple(dict.fromkeys(ends)), few, 2)
        if Solver(LeafStates(problem, given), scope).best() is not None:
            return True
    return False


def _too_large(problem: Problem) -> str | None:
    """A worker whose state fits on no lane, in whichever layout."""
    for worker in problem.tasks_of:
        shares = [problem.state(worker, *layout)[0] for layout in problem.worker_layouts(worker)]
        if min(shares, default=math.inf) > 1:
            return f"the state of {worker!r} takes more than a lane has in each layout it was given"
    return None
