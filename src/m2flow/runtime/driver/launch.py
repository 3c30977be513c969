"""`launch`: put a flow on lanes and run its steps.

    with m2flow.launch(flow, items_per_step=32, mode="collocated", lanes="cpu:2") as run:
        for result in run.steps(batches):
            print(result.step, result.metrics)

The driver follows from the plan: one process for `eager`, Ray for everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.flow.flow import Flow
from m2flow.flow.worker import Layout
from m2flow.plan import build_plan
from m2flow.runtime.arguments import check_count, check_kind, check_seconds
from m2flow.runtime.driver.auto import AUTO, GUESSES, Auto
from m2flow.runtime.driver.methods import STEP, Methods
from m2flow.runtime.driver.run import Run
from m2flow.runtime.driver.starting import (
    LANE_RESTARTS,
    LOAD_SECONDS,
    in_this_process,
    lanes_of,
    methods_of,
    on_lanes,
    specs_of,
)

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
    auto: Auto = AUTO,
    load_deadline_seconds: float = LOAD_SECONDS,
    lane_restarts: int = LANE_RESTARTS,
    elastic: bool = False,
    snapshot_every: int | None = None,
) -> Run:
    """Start a flow's workers on lanes.

    Args:
        flow: what is to be run.
        items_per_step: source items of each step.
        mode: the plan to build, where none is given. By default one process, in which a new flow
            can be debugged; a recipe's flow is known to run, and its default is "auto". With "auto"
            the run begins with a guess, learns from its first steps what the stages take, and tries
            the plans that may be best.
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
        auto: how mode "auto" goes about it.
        load_deadline_seconds: longest that a lane may take to bring one worker up. A lane that goes
            on to its next worker has made progress, and gets as long again. Lanes that are started
            for the run have as long, and two minutes at least, to be up.
        lane_restarts: how often a lane whose process has ended may be started again; then, and
            with 0, the run ends.
        elastic: the run goes on without a lane that cannot be started again, under a plan for those
            that are left, and takes it in again when it can be had. The plan must be one of a mode.
        snapshot_every: steps after which a snapshot of the learners' states is taken at the latest,
            whatever it costs; None: as often as little of the lanes' time allows.

    Raises:
        UserError: the flow, the mode, the lanes or the plan are wrong. Nothing was started then,
            unless what is wrong is that the workers' states do not fit: that is known once they
            are loaded.
    """
    check_kind("mode", mode, str, "a mode, such as 'collocated'")
    check_kind("auto", auto, Auto, "an m2flow.Auto")
    check_kind("layouts", layouts, Mapping, "a Layout for each worker")
    for worker, layout in layouts.items():
        check_kind(f"layouts.{worker}", layout, Layout, "a Layout")
    if plan is not None:
        read = "m2flow.plan.read_plan(path) reads a file"
        check_kind("plan", plan, Plan, "an m2flow.plan.Plan", read)
    methods = methods_of(flow, items_per_step, also)
    check_count("first_step", first_step, least=0)
    check_count("lane_restarts", lane_restarts, least=0)
    check_seconds("load_deadline_seconds", load_deadline_seconds)
    at_least_1 = {
        "num_threads": num_threads,
        "lane_memory": lane_memory,
        "snapshot_every": snapshot_every,
    }
    for key, count in at_least_1.items():
        if count is not None:
            check_count(key, count)
    graphs, pilot = methods.graphs, None
    if mode == "auto" and plan is None:
        specs = specs_of(lanes, lane_memory)
        free = [lane for lane in specs if lane.reserved_for is None]
        guess = build_plan(
            GUESSES[0], graphs[STEP], free, items_per_step, methods.isolated, layouts
        )
        reserved = [lane for lane in specs if lane.reserved_for is not None]
        pilot = _pilot(auto, methods, (*free, *reserved) if reserved else guess.lanes, layouts)
        plans, hosts = methods.planned(pilot.plan), methods.planned(guess).everything.lanes
    else:
        if plan is None:
            specs = specs_of(lanes, lane_memory)
            plan = build_plan(mode, graphs[STEP], specs, items_per_step, methods.isolated, layouts)
        plans = methods.planned(plan)
        hosts = plans.everything.lanes
        if plan.mode == "eager":
            return in_this_process(methods, plans, flow, first_step, num_threads)
    with lanes_of(lanes, hosts, flow, load_deadline_seconds) as pool:
        return on_lanes(
            methods,
            plans,
            flow,
            first_step,
            pool,
            load_deadline_seconds,
            pilot,
            lane_restarts,
            elastic,
            snapshot_every,
        )


def _pilot(
    auto: Auto, methods: Methods, lanes: Sequence[LaneSpec], layouts: Mapping[str, Layout]
) -> Pilot:
    """The pilot of a run on these lanes, with the plan to begin with."""
    from m2flow.runtime.driver.pilot import Pilot  # NumPy comes along

    return Pilot(
        methods.graphs[STEP],
        lanes,
        methods.num_items[STEP],
        known=auto.profile,
        max_staleness=auto.max_staleness,
        isolated=methods.isolated,
        layouts=layouts,
        num_steps=auto.num_steps,
        deadline_seconds=auto.deadline_seconds,
        keep=auto.keep,
    )
