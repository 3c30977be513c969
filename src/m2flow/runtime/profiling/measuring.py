"""Measuring a flow: from fresh workers, batches and lanes to a profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.flow import Flow
from m2flow.plan import isolated_workers, parse_lanes
from m2flow.plan.measured import fit_to, trial_plans
from m2flow.plan.profile import LinkCost, Profile
from m2flow.plan.units import BytesPerSecond, Seconds
from m2flow.runtime.profiling.session import Session

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool

BUDGET_SECONDS = 60.0

MESSAGE_BYTES = 64 * 1024
"""Size of the message for which the way between two lanes is chosen."""


@dataclass(frozen=True)
class Measured:
    """A profile, and how it came to be.

    Attributes:
        profile: the fit.
        error: the largest relative standard error among the calls that matter.
        visits: how often a plan was run.
        seconds: what all of it took, the start of lanes included.
    """

    profile: Profile
    error: float
    visits: int
    seconds: float


def profile_flow(
    make_flow: Callable[[], Flow],
    batches: Sequence[Batch],
    *,
    lanes: str | Sequence[LaneSpec] | LanePool,
    budget_seconds: float = BUDGET_SECONDS,
    key: Mapping[str, Mapping[str, object]] | None = None,
    note: Callable[[str], None] | None = None,
) -> Profile:
    """The profile of a flow; see `measure_flow`."""
    return measure_flow(
        make_flow, batches, lanes=lanes, budget_seconds=budget_seconds, key=key, note=note
    ).profile


def measure_flow(
    make_flow: Callable[[], Flow],
    batches: Sequence[Batch],
    *,
    lanes: str | Sequence[LaneSpec] | LanePool,
    budget_seconds: float = BUDGET_SECONDS,
    key: Mapping[str, Mapping[str, object]] | None = None,
    note: Callable[[str], None] | None = None,
) -> Measured:
    """Run steps of a flow under a few plans, and fit a profile to them.

    Args:
        make_flow: makes the flow with workers that may be thrown away.
        batches: source items of the first steps, as many in each; they are used again and again.
        lanes: lanes of this machine, as `cpu:2`, or spelled out; or a pool of lanes that are up,
            which stays up. Lanes are started, and ended, otherwise.
        budget_seconds: for all of it, the start of lanes included. Each plan that is begun is
            carried through, and the first one is always begun. A profile for which some were left
            out says so (`Profile.cut_by`).
        key: what the profile depends on.
        note: told what is going on.

    Raises:
        UserError: there is no batch, or the flow, the lanes or the batches are wrong.
        RunFailed: a step failed.
    """
    started = time.monotonic()
    if not batches:
        raise UserError("a flow is measured on batches, and there is none", key="batches")
    flow = make_flow()
    graph, isolated = flow.trace(), isolated_workers(flow)
    specs: Sequence[LaneSpec]
    if isinstance(lanes, str):
        specs = parse_lanes(lanes)
    else:
        specs = lanes.lanes if hasattr(lanes, "lanes") else lanes

    def fits_gang(worker: str, size: int) -> bool:
        return flow.workers[worker].fits_gang(size)

    plans = trial_plans(graph, specs, len(batches[0]), isolated=isolated, fits_gang=fits_gang)
    with _pool(lanes, plans[0], flow) as pool:
        session = Session(graph, pool, make_flow, batches, plans, started + budget_seconds)
        while (number := session.next()) is not None:
            session.visit(number)
            if note is not None:
                note(session.account())
        profile = fit_to(session.evidence, key=key, links=_links(pool))
    if not session.complete:
        profile = replace(profile, cut_by=Seconds(max(0.0, budget_seconds)))
    seconds = time.monotonic() - started
    return Measured(profile, session.error, session.visits, seconds)


def _pool(
    lanes: str | Sequence[LaneSpec] | LanePool, plan: Plan, flow: Flow
) -> AbstractContextManager[LanePool]:
    """The given lanes, left up; or those of a plan, started for this."""
    from m2flow.runtime.driver.pool import LanePool

    if isinstance(lanes, LanePool):
        return nullcontext(lanes)
    isolation = {
        name: one for name, worker in flow.workers.items() if (one := worker.isolation) is not None
    }
    return LanePool(plan.lanes, isolation)


def _links(pool: LanePool) -> dict[str, LinkCost]:
    """What the pool knows of the ways between its lanes, by place."""
    found = {}
    for scope in pool.links.costs:
        if scope not in ("node", "cluster"):
            continue
        kind = pool.links.choose(scope, MESSAGE_BYTES)
        if kind is not None:
            cost = pool.links.costs[scope][kind]
            rate = cost.bytes_per_second
            finite = rate if math.isfinite(rate) else 1e12
            found[str(scope)] = LinkCost(Seconds(cost.latency_seconds), BytesPerSecond(finite))
    return found
