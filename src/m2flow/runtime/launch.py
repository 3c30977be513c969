"""`launch`: put a flow on lanes and run its steps.

    with m2flow.launch(flow, items_per_step=32, mode="collocated", lanes="cpu:2") as run:
        for result in run.steps(batches):
            print(result.step, result.metrics)

The driver follows from the plan: one process for `eager`, Ray for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from m2flow.engine.inline import InlineCarrier
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.engine.residency import Residency
from m2flow.engine.runner import Runner, StepResult
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Worker
from m2flow.plan import (
    build_plan,
    companion,
    isolated_workers,
    parse_lanes,
    validate,
    with_memory,
    with_sizes,
)
from m2flow.plan.memory import check_memory

if TYPE_CHECKING:
    from m2flow.runtime.pool import LanePool


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
    gangs: Mapping[str, int] = MappingProxyType({}),
    publish: str | None = None,
) -> Run:
    """Start a flow's workers on lanes.

    Args:
        flow: what is to be run.
        items_per_step: source items of each step.
        mode: the plan to build, where none is given.
        lanes: lanes of this machine, as `cpu:2`, or of several, as `2xcpu:1`; or spelled out; or
            a pool of lanes that are up, which stay up when the run is closed.
        plan: a plan to run instead of a built one.
        first_step: number of the first step; the weights loaded count as this version.
        also: further methods of the flow to trace, such as "evaluate", each with the number of
            items it is planned for; see `Run.run_method`.
        num_threads: threads of an eager run; by default one for each core of its lane.
        lane_memory: bytes that the states on a lane may take; workers are then moved out of each
            other's way. None for no limit.
        gangs: worker to how many lanes take part in each of its calls, where a plan is built.
        publish: the one way to send weights to other lanes, "shared", "copy", "broadcast" or
            "delta"; by default the one predicted to be fastest (see `Run.explain_publishing`).

    Raises:
        UserError: the flow, the mode, the lanes or the plan are wrong. Nothing was started then,
            unless what is wrong is that the workers' states do not fit: that is known once they
            are loaded.
    """
    graph = flow.trace()
    graphs = {"step": graph, **{method: flow.trace(method) for method in also}}
    isolated = isolated_workers(flow)
    if plan is None:
        specs = _specs(lanes)
        if lane_memory is not None:
            specs = with_memory(specs, lane_memory)
        plan = build_plan(mode, graph, specs, items_per_step, isolated, gangs)
    validate(plan, graph, items_per_step, isolated)
    plans = {"step": plan}
    with_all_lanes = plan  # each further method may reserve lanes, numbered after those before
    for method, items in also.items():
        plans[method] = companion(with_all_lanes, graphs[method], items, isolated)
        with_all_lanes = replace(plan, lanes=plans[method].lanes)
    everything = replace(
        plan,
        lanes=with_all_lanes.lanes,
        placements={w: spot for each in plans.values() for w, spot in each.placements.items()},
    )
    workers = {
        name: worker for name, worker in flow.workers.items() if name in everything.placements
    }
    if plan.mode == "eager":
        return _eager(graphs, plans, everything, workers, items_per_step, first_step, num_threads)

    from m2flow.runtime.carrier import RayCarrier
    from m2flow.runtime.pool import FAILED_SECONDS, LanePool

    given = isinstance(lanes, LanePool)
    isolation = {
        name: one for name in isolated if name in workers and (one := workers[name].isolation)
    }
    pool = lanes if isinstance(lanes, LanePool) else LanePool(everything.lanes, isolation)
    try:
        _check_lanes(everything, pool)
        carrier = RayCarrier(pool, graphs, everything, workers, plans, first_step, publish=publish)
        plans, everything = _sized(plans, everything, graphs, carrier.state_bytes)
        return Run(
            graphs,
            plans,
            everything,
            carrier,
            items_per_step,
            first_step,
            None if given else pool,
        )
    except BaseException:
        if not given:
            pool.close(FAILED_SECONDS)
        raise


def _eager(
    graphs: Mapping[str, FlowGraph],
    plans: Mapping[str, Plan],
    everything: Plan,
    workers: Mapping[str, Worker],
    items_per_step: int,
    first_step: int,
    num_threads: int | None,
) -> Run:
    """The run of an eager plan: everything in this process."""
    lane = plans["step"].lanes[0]
    threads = num_threads or max(1, len(lane.cores))
    device = "cpu" if lane.kind == "cpu" else "cuda:0"
    _set_num_threads(threads)
    carrier = InlineCarrier(graphs, everything, workers, threads, device, first_step)
    try:
        plans, everything = _sized(plans, everything, graphs, carrier.state_bytes)
    except BaseException:
        carrier.close()
        raise
    return Run(graphs, plans, everything, carrier, items_per_step, first_step)


def _specs(lanes: str | Sequence[LaneSpec] | LanePool) -> Sequence[LaneSpec]:
    if isinstance(lanes, str):
        return parse_lanes(lanes)
    return lanes.lanes if hasattr(lanes, "lanes") else lanes


def _check_lanes(plan: Plan, pool: LanePool) -> None:
    """Refuse a plan for lanes that a pool does not have; limits of memory may differ."""
    there = {lane.id: lane for lane in pool.lanes}
    for lane in plan.lanes:
        started = there.get(lane.id)
        if started is None or replace(started, memory_bytes=lane.memory_bytes) != lane:
            raise UserError(
                "the plan is for another lane than the pool has",
                key="lanes",
                value=lane,
                expected=str(started) if started else f"one of {sorted(there)}",
            )


def _sized(
    plans: Mapping[str, Plan],
    everything: Plan,
    graphs: Mapping[str, FlowGraph],
    state_bytes: Mapping[str, int],
) -> tuple[dict[str, Plan], Plan]:
    """The plans with what the workers say of their sizes, where a plan says nothing itself.

    Raises:
        PlanError: a lane cannot hold what a command needs.
    """
    unknown = {w for w, spot in everything.placements.items() if not spot.state_bytes}
    sizes = {worker: size for worker, size in state_bytes.items() if worker in unknown}
    sized = {
        name: with_sizes(plan, {w: n for w, n in sizes.items() if w in plan.placements}, {})
        for name, plan in plans.items()
    }
    for name, plan in sized.items():
        check_memory(plan, graphs[name])
    return sized, with_sizes(everything, sizes, {})


class Run:
    """A flow on its lanes. Made by `launch`; use it as a context manager, or call `close`.

    Attributes:
        plan: the plan of the steps.
        graph: their graph.
    """

    def __init__(
        self,
        graphs: Mapping[str, FlowGraph],
        plans: Mapping[str, Plan],
        everything: Plan,
        carrier: Any,
        items_per_step: int,
        first_step: int,
        pool: LanePool | None = None,
    ) -> None:
        self.graph, self.plan = graphs["step"], plans["step"]
        self._items_per_step = items_per_step
        self._carrier, self._pool = carrier, pool
        self._placements = everything.placements
        self._residency = Residency(everything)
        self._runners = {
            name: Runner(name, graphs[name], plans[name], carrier, first_step, self._residency)
            for name in graphs
        }

    def step(self, batch: Batch) -> StepResult:
        """Run one step to its end."""
        return next(iter(self.steps([batch])))

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepResult]:
        """Run a step for each batch; several are in flight where the plan allows staleness.

        Raises:
            RunFailed: the run stopped; the first cause is chained.
            UserError: a stage or a batch was wrong.
        """
        return self._runners["step"].run(self._checked(batch) for batch in batches)

    def _checked(self, batch: Batch) -> Batch:
        if len(batch) != self._items_per_step:
            raise UserError(
                "the step was planned for another number of items",
                key="items_per_step",
                value=len(batch),
                expected=str(self._items_per_step),
            )
        return batch

    def run_method(self, name: str, batch: Batch) -> StepResult:
        """Run another traced method of the flow, such as "evaluate", between steps.

        Raises:
            UserError: steps are in flight, whose results have not been taken.
        """
        if self._runners["step"].busy:
            raise UserError(
                "steps are in flight", key=name, hint="take all results of `steps` before"
            )
        return self._runners[name].step(batch)

    def worker_call(self, worker: str, method: str, *args: Any) -> Any:
        """Call a method of a worker that is no stage (such as `save`), on its first lane.

        Under a limit of memory the worker is brought in before.

        Raises:
            UserError: there is a limit, and steps are in flight, whose results have not been taken.
        """
        self._bring(worker, method, self._placements[worker].lanes[:1])
        return self._carrier.worker_call(worker, method, *args)

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """The same on all of its lanes; the answers in order of rank."""
        self._bring(worker, method, self._placements[worker].lanes)
        answers: list[Any] = self._carrier.worker_call_everywhere(worker, method, *args)
        return answers

    def explain_publishing(self) -> dict[str, str]:
        """Which way weights travel to other lanes -> its size, its predicted time, and why.

        There is one way for each worker that publishes and each distance; it is here as soon as a
        version has been published. What goes to other nodes may change with what is measured.
        """
        publisher = getattr(self._carrier, "publisher", None)
        return {} if publisher is None else dict(publisher.explain())

    def _bring(self, worker: str, method: str, lanes: Sequence[int]) -> None:
        """Have a worker's state resident on lanes that have a limit of memory."""
        for lane in lanes:
            if not self._residency.limited(lane):
                continue
            if any(runner.busy for runner in self._runners.values()):
                raise UserError(
                    "steps are in flight",
                    key=f"{worker}.{method}",
                    hint="take all results of `steps` before",
                )
            for move in self._residency.bring((worker,), lane):
                self._carrier.carry_out("step", move)

    def close(self) -> None:
        """End the lanes, and the Ray cluster, if they were started for this run."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._carrier.close()
        if self._pool is not None:
            self._pool.__exit__(kind, error, trace)


def _set_num_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)
