"""Starting a plan: in this process, or on the lanes of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import PlanError, RunFailed, UserError
from m2flow.flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Isolation, Worker
from m2flow.plan import isolated_workers, parse_lanes, with_memory
from m2flow.runtime.arguments import check_count, check_kind
from m2flow.runtime.driver.inline import InlineCarrier
from m2flow.runtime.driver.methods import STEP, Methods, Plans, check_lanes
from m2flow.runtime.driver.recovery import LaneLoss
from m2flow.runtime.driver.run import Run
from m2flow.runtime.lane.exhausted import is_exhaustion

if TYPE_CHECKING:  # an eager run does without Ray
    from m2flow.runtime.driver.carrier import RayCarrier
    from m2flow.runtime.driver.pilot import Pilot
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.supervision import Supervision

LOAD_SECONDS = 1800.0
"""Longest that lanes may take to start, and a lane to bring one worker up, unless it is said
otherwise."""

LANE_RESTARTS = 3
"""How often each lane may be started again in a run, unless it is said otherwise."""


def methods_of(
    flow: Flow, items_per_step: int, also: Mapping[str, int] = MappingProxyType({})
) -> Methods:
    """What a run of a flow can do; `also` as for `launch`.

    Raises:
        UserError: the flow is none, `also` names the step, a number of items is none, or weights
            are published that nobody gives, or takes.
    """
    make = f"make one: {flow.__name__}(...)" if isinstance(flow, type) else None
    check_kind("flow", flow, Flow, "a Flow", make)
    check_kind("also", also, Mapping, "a number of items for each method")
    check_count("items_per_step", items_per_step)
    for method, count in also.items():
        check_count(f"also.{method}", count)
    if STEP in also:
        raise UserError(
            "is what a run does anyway", key=f"also.{STEP}", hint="its items are `items_per_step`"
        )
    graphs = {STEP: flow.trace(), **{method: flow.trace(method) for method in also}}
    _check_published(flow.workers, graphs[STEP])
    collective = frozenset(name for name, worker in flow.workers.items() if worker.collective)
    return Methods(graphs, {STEP: items_per_step, **also}, isolated_workers(flow), collective)


def _check_published(workers: Mapping[str, Worker], graph: FlowGraph) -> None:
    """Refuse weights that a worker does not give, or that another one does not take."""
    for edge in graph.weight_edges:
        if type(workers[edge.source]).weights is Worker.weights:
            raise UserError(
                f"it publishes its weights to {edge.target}, and does not say what they are",
                key=f"{edge.source}.weights",
                hint="define `weights`",
            )
        if type(workers[edge.target]).install is Worker.install:
            raise UserError(
                f"it runs on the weights of {edge.source}, and does not say how it takes them over",
                key=f"{edge.target}.install",
                hint="define `install`",
            )


def run_on(flow: Flow, items_per_step: int, plan: Plan, pool: LanePool) -> Run:
    """The run of a plan on lanes that are up."""
    methods = methods_of(flow, items_per_step)
    return on_lanes(methods, methods.planned(plan), flow, 0, (pool, False), LOAD_SECONDS)


def in_this_process(
    methods: Methods, plans: Plans, flow: Flow, first_step: int, num_threads: int | None
) -> Run:
    """The run of an eager plan: all in this process, which has as many threads afterwards."""
    import torch

    lane = plans.by_method[STEP].lanes[0]
    threads = num_threads or max(1, len(lane.cores))
    device = "cpu" if lane.kind == "cpu" else "cuda:0"
    as_before = partial(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    graphs, workers = methods.graphs, plans.placed(flow.workers)
    try:
        carrier = InlineCarrier(
            graphs, plans.everything, workers, threads, device, first_step, on_close=as_before
        )
    except BaseException:
        as_before()
        raise
    try:
        sized = plans.sized(carrier.state_bytes, graphs)
    except BaseException:
        carrier.close()
        raise
    return Run(methods, sized, workers, carrier, first_step)


def specs_of(
    lanes: str | Sequence[LaneSpec] | LanePool, lane_memory: int | None = None
) -> Sequence[LaneSpec]:
    """Lanes that are asked for, or those of a pool; with a limit of memory, if one is given.

    Raises:
        UserError: they are neither, or are not there.
    """
    specs: Sequence[LaneSpec]
    expected = "a text such as 'cpu:2', LaneSpecs or a LanePool"
    if isinstance(lanes, str):
        specs = parse_lanes(lanes)
    else:
        specs = lanes.lanes if hasattr(lanes, "lanes") else lanes
        check_kind("lanes", specs, Sequence, expected)
        for lane in specs:
            check_kind("lanes", lane, LaneSpec, expected)
        if not specs:
            raise UserError("there is none", key="lanes", expected=expected)
    if lane_memory is None:
        return specs
    return with_memory(specs, lane_memory)


def isolation_of(flow: Flow) -> dict[str, Isolation]:
    """How the lanes of those workers are to be set up that must have a process of their own."""
    workers = flow.workers.items()
    return {name: one.isolation for name, one in workers if one.isolation is not None}


@contextmanager
def lanes_of(
    given: object, wanted: Sequence[LaneSpec], flow: Flow, start_seconds: float
) -> Iterator[tuple[LanePool, bool]]:
    """A pool that is given, or one of one's own, which is closed if what follows fails."""
    from m2flow.runtime.driver.pool import FAILED_SECONDS, LanePool

    if isinstance(given, LanePool):
        yield given, False
        return
    pool = LanePool(wanted, isolation_of(flow), start_seconds=start_seconds)
    try:
        yield pool, True
    except BaseException:
        pool.close(FAILED_SECONDS)
        raise


def on_lanes(
    methods: Methods,
    plans: Plans,
    flow: Flow,
    first_step: int,
    lanes: tuple[LanePool, bool],
    load_deadline_seconds: float,
    pilot: Pilot | None = None,
    lane_restarts: int = LANE_RESTARTS,
    elastic: bool = False,
    snapshot_every: int | None = None,
) -> Run:
    """The run of a plan on the lanes of a pool, which may be its own."""
    from m2flow.runtime.driver.carrier import RayCarrier
    from m2flow.runtime.driver.elastic import ElasticPlan
    from m2flow.runtime.driver.supervision import Supervision

    pool, owns_pool = lanes
    check_lanes(plans.everything, pool)
    if pool.spoiled is not None:
        raise RunFailed(f"no run can be started on these lanes any more: {pool.spoiled}")
    workers, start = plans.placed(flow.workers), time.perf_counter()

    def load(plans: Plans) -> RayCarrier:
        return RayCarrier(
            pool,
            methods.graphs,
            plans.everything,
            workers,
            plans.by_method,
            first_step,
            load_seconds=load_deadline_seconds,
        )

    plan_for = ElasticPlan(methods, plans, flow.workers, pilot) if elastic else None
    supervision = Supervision(pool, lane_restarts, plan_for)
    plans, carrier, losses = _loaded(pool, methods, plans, load, supervision, pilot)
    return Run(
        methods,
        plans,
        workers,
        carrier,
        first_step,
        pool=pool,
        owns_pool=owns_pool,
        load_seconds=time.perf_counter() - start,
        load_deadline_seconds=load_deadline_seconds,
        pilot=pilot,
        supervision=supervision,
        losses=losses,
        snapshot_every=snapshot_every,
    )


def _loaded(
    pool: LanePool,
    methods: Methods,
    plans: Plans,
    load: Callable[[Plans], RayCarrier],
    supervision: Supervision,
    pilot: Pilot | None = None,
) -> tuple[Plans, RayCarrier, list[LaneLoss]]:
    """Load the workers; where lanes are lost meanwhile, start them again, and load once more.

    Where a plan of the pilot needs more memory than there is, another one is loaded.

    Raises:
        RunFailed: a lane is lost again and again, or something else went wrong.
    """
    from m2flow.runtime.driver.stalled import explain

    heard: dict[tuple[int, float], str] = {}
    while True:
        try:
            carrier = load(plans)
            plans = plans.sized(carrier.state_bytes, methods.graphs)
        except RunFailed as error:
            if not pool.lost or not supervision.heals:
                explain(error, pool)
                raise
            heard |= {(lane, at): why for lane, (why, at) in pool.lost.items()}
            supervision.count(error)
            supervision.bring_back(())
            if (remade := supervision.remade(plans.everything)) is not None:
                plans = methods.planned(remade)
        except Exception as error:
            wants_less = isinstance(error, PlanError) or is_exhaustion(error)
            if pilot is None or pool.spoiled or not wants_less:
                raise
            if (other := pilot.begin_instead(str(error).splitlines()[0])) is None:
                raise
            plans = methods.planned(other)
        else:
            lost = [(lane, why, at) for (lane, at), why in heard.items()]
            return plans, carrier, supervision.losses(lost, plans.by_method[STEP], 0)
