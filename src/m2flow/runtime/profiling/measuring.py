"""Measuring a flow on purpose: from fresh workers, batches and lanes to a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.flow import Flow
from m2flow.plan import isolated_workers, parse_lanes
from m2flow.plan.profile import LinkCost, Profile
from m2flow.plan.profile.trials import declared, trial_plans
from m2flow.plan.units import BytesPerSecond, Seconds
from m2flow.runtime.profiling.session import Session
from m2flow.runtime.transport.table import ASSUMED

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool

BUDGET_SECONDS = 60.0

MESSAGE_BYTES = 64 * 1024
"""Size of the message for which the way between two lanes is chosen."""

FASTEST = 1e12
"""Bytes a second of a way on which size was not seen to matter."""


def profile_flow(
    make_flow: Callable[[], Flow],
    batches: Sequence[Batch],
    *,
    lanes: str | Sequence[LaneSpec] | LanePool,
    budget_seconds: float = BUDGET_SECONDS,
    key: Mapping[str, Mapping[str, object]] | None = None,
    note: Callable[[str], None] | None = None,
) -> Profile:
    """Run steps of a flow under a few plans, and return the profile that explains them.

    Args:
        make_flow: makes the flow with workers that may be thrown away.
        batches: source items of the first steps, as many in each; they are used again and again.
        lanes: lanes of this machine, as `cpu:2`, or spelled out; or a pool of lanes that are up,
            which stays up. Lanes are started, and ended, otherwise.
        budget_seconds: for all of it, the start of lanes included. Each plan that is begun is
            carried through, and the first one is always begun.
        key: what the profile depends on.
        note: told what is going on.

    Raises:
        UserError: there is no batch, or the flow, the lanes or the batches are wrong.
        RunFailed: a step failed.
    """
    from m2flow.plan.profile.learning import fitted  # with numpy, which planning does without

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
    free = [lane for lane in specs if lane.reserved_for is None]
    layouts = declared(graph, flow.workers, free)
    plans = trial_plans(graph, specs, len(batches[0]), isolated=isolated, layouts=layouts)
    with _pool(lanes, plans[0], flow) as pool:
        links = _links(pool)
        session = Session(graph, pool, make_flow, batches, plans, started + budget_seconds)
        for account in session.run():
            if note is not None:
                note(account)
        return fitted(session.evidence, key=key, links=links)


def _pool(
    lanes: str | Sequence[LaneSpec] | LanePool, plan: Plan, flow: Flow
) -> AbstractContextManager[LanePool]:
    """Return the given lanes, left up; or those of a plan, started for this."""
    from m2flow.runtime.driver.pool import LanePool

    if isinstance(lanes, LanePool):
        return nullcontext(lanes)
    isolation = {
        name: one for name, worker in flow.workers.items() if (one := worker.isolation) is not None
    }
    return LanePool(plan.lanes, isolation)


def _links(pool: LanePool) -> dict[str, LinkCost]:
    """Return what the ways between the pool's lanes take, by place."""
    found, table = {}, ASSUMED.merged(pool.measure_links())
    for scope in ("node", "cluster"):
        cost = table.taken(scope, MESSAGE_BYTES)
        if cost is not None:
            rate = cost.bytes_per_second or FASTEST
            found[scope] = LinkCost(Seconds(cost.latency_seconds), BytesPerSecond(rate))
    return found
