"""`launch`: put a flow on lanes and run its steps.

    with m2flow.launch(flow, items_per_step=32, mode="collocated", lanes="cpu:2") as run:
        for result in run.steps(batches):
            print(result.step, result.metrics)

The driver follows from the plan: one process for `eager`, Ray for everything else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import RunFailed
from m2flow.flow.flow import Flow
from m2flow.flow.worker import Layout
from m2flow.plan import build_plan, isolated_workers, parse_lanes, with_memory
from m2flow.runtime.driver.auto import AUTO, Auto
from m2flow.runtime.driver.inline import InlineCarrier
from m2flow.runtime.driver.methods import STEP, Methods, Plans, check_lanes
from m2flow.runtime.driver.run import Run

__all__ = ["Auto", "Run", "launch"]

if TYPE_CHECKING:
    from m2flow.runtime.driver.pilot import Pilot
    from m2flow.runtime.driver.pool import LanePool


def launch(
    flow: Flow,
    *,
    items_per_step: int,
    mode: str = "eager",
    lanes: str | Sequence[LaneSpec] | LanePool = "auto",
    plan: Plan | None = None,
    first_step: int = 0,
    also: Mapping[str, int] = MappingProxyType({}),
    num_threads: int | None = None,
    lane_memory: int | None = None,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    publish: str | None = None,
    auto: Auto = AUTO,
    load_deadline_seconds: float = 1800.0,
) -> Run:
    """Start a flow's workers on lanes.

    Args:
        flow: what is to be run.
        items_per_step: source items of each step.
        mode: the plan to build, where none is given. With "auto" the run begins with a guess,
            learns from its first steps what the stages take, and tries the plans that may be best.
        lanes: lanes of this machine, as `cpu:2`, or of several, as `2xcpu:1`; or spelled out; or
            a pool of lanes that are up, which stay up when the run is closed.
        plan: a plan to run instead of a built one.
        first_step: number of the first step; the weights loaded count as this version.
        also: further methods of the flow to trace, such as "evaluate", each with the number of
            items it is planned for; see `Run.run_method`.
        num_threads: threads of an eager run; by default one for each core of its lane.
        lane_memory: bytes that the states on a lane may take; workers are then moved out of each
            other's way. None for no limit.
        layouts: worker to the layout of its replicas, where a plan is built; one lane for each
            replica of those left out.
        publish: the one way to send weights to other lanes, "shared", "copy" or "broadcast"; by
            default it follows from where the workers stand (see `Run.explain_publishing`).
        auto: how mode "auto" goes about it.
        load_deadline_seconds: longest that a lane may take to bring one worker up. A lane that goes
            on to its next worker has made progress, and gets as long again.

    Raises:
        UserError: the flow, the mode, the lanes or the plan are wrong. Nothing was started then,
            unless what is wrong is that the workers' states do not fit: that is known once they
            are loaded.
    """
    graphs = {STEP: flow.trace(), **{method: flow.trace(method) for method in also}}
    collective = frozenset(name for name, worker in flow.workers.items() if worker.collective)
    methods = Methods(graphs, {STEP: items_per_step, **also}, isolated_workers(flow), collective)
    if mode == "auto" and plan is None:
        specs = _specs(lanes, lane_memory)
        free = [lane for lane in specs if lane.reserved_for is None]
        guess = build_plan(
            "collocated", graphs[STEP], free, items_per_step, methods.isolated, layouts
        )
        reserved = [lane for lane in specs if lane.reserved_for is not None]
        pilot = auto.pilot(methods, (*free, *reserved) if reserved else guess.lanes, layouts)
        with _lanes(lanes, methods.planned(guess).everything.lanes, methods, flow) as pool:
            return _on_lanes(
                methods,
                methods.planned(pilot.plan),
                flow,
                first_step,
                pool,
                publish,
                load_deadline_seconds,
                pilot,
            )
    if plan is None:
        specs = _specs(lanes, lane_memory)
        plan = build_plan(mode, graphs[STEP], specs, items_per_step, methods.isolated, layouts)
    plans = methods.planned(plan)
    if plan.mode == "eager":
        return _eager(methods, plans, flow, first_step, num_threads)
    with _lanes(lanes, plans.everything.lanes, methods, flow) as pool:
        return _on_lanes(methods, plans, flow, first_step, pool, publish, load_deadline_seconds)


def _eager(
    methods: Methods, plans: Plans, flow: Flow, first_step: int, num_threads: int | None
) -> Run:
    """The run of an eager plan: everything in this process."""
    lane = plans.by_method[STEP].lanes[0]
    threads = num_threads or max(1, len(lane.cores))
    device = "cpu" if lane.kind == "cpu" else "cuda:0"
    _set_num_threads(threads)
    graphs, workers = methods.graphs, plans.placed(flow.workers)
    carrier = InlineCarrier(graphs, plans.everything, workers, threads, device, first_step)
    try:
        sized = plans.sized(carrier.state_bytes, graphs)
    except BaseException:
        carrier.close()
        raise
    return Run(methods, sized, workers, carrier, first_step)


@contextmanager
def _lanes(
    given: object, wanted: Sequence[LaneSpec], methods: Methods, flow: Flow
) -> Iterator[tuple[LanePool, bool]]:
    """A pool that is given, or one of one's own, which is closed if what follows fails."""
    from m2flow.runtime.driver.pool import FAILED_SECONDS, LanePool

    if isinstance(given, LanePool):
        yield given, False
        return
    workers = {name: flow.workers[name] for name in methods.isolated if name in flow.workers}
    isolation = {name: one for name, worker in workers.items() if (one := worker.isolation)}
    pool = LanePool(wanted, isolation)
    try:
        yield pool, True
    except BaseException:
        pool.close(FAILED_SECONDS)
        raise


def _on_lanes(
    methods: Methods,
    plans: Plans,
    flow: Flow,
    first_step: int,
    lanes: tuple[LanePool, bool],
    publish: str | None,
    load_deadline_seconds: float,
    pilot: Pilot | None = None,
) -> Run:
    """The run of a plan on the lanes of a pool, which may be its own."""
    from m2flow.runtime.driver.carrier import RayCarrier

    pool, owns_pool = lanes
    check_lanes(plans.everything, pool)
    if pool.spoiled is not None:
        raise RunFailed(f"no run can be started on these lanes any more: {pool.spoiled}")
    workers, start = plans.placed(flow.workers), time.perf_counter()
    carrier = RayCarrier(
        pool,
        methods.graphs,
        plans.everything,
        workers,
        plans.by_method,
        first_step,
        load_seconds=load_deadline_seconds,
        publish=publish,
    )
    return Run(
        methods,
        plans.sized(carrier.state_bytes, methods.graphs),
        workers,
        carrier,
        first_step,
        pool=pool,
        owns_pool=owns_pool,
        publish=publish,
        load_seconds=time.perf_counter() - start,
        load_deadline_seconds=load_deadline_seconds,
        pilot=pilot,
    )


def _specs(
    lanes: str | Sequence[LaneSpec] | LanePool, lane_memory: int | None
) -> Sequence[LaneSpec]:
    """Lanes that are asked for, or those of a pool that nobody has reserved."""
    specs: Sequence[LaneSpec]
    if isinstance(lanes, str):
        specs = parse_lanes(lanes)
    else:
        specs = lanes.lanes if hasattr(lanes, "lanes") else lanes
    return specs if lane_memory is None else with_memory(specs, lane_memory)


def _set_num_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)
