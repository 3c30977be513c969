"""`launch`: put a flow on lanes and run its steps.

    with m2flow.launch(flow, items_per_step=32, mode="collocated", lanes="cpu:2") as run:
        for result in run.steps(batches):
            print(result.step, result.metrics)

The driver follows from the plan: one process for `eager`, Ray for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self

from m2flow.engine.inline import InlineCarrier
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.engine.runner import Runner, StepResult
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.flow import Flow
from m2flow.plan import build_plan, companion, parse_lanes, validate


def launch(
    flow: Flow,
    *,
    items_per_step: int,
    mode: str = "eager",
    lanes: str | Sequence[LaneSpec] = "auto",
    plan: Plan | None = None,
    first_step: int = 0,
    also: Mapping[str, int] = MappingProxyType({}),
    num_threads: int | None = None,
) -> Run:
    """Start a flow's workers on lanes.

    Args:
        flow: what is to be run.
        items_per_step: source items of each step.
        mode: the plan to build, where none is given.
        lanes: lanes of this machine, as `cpu:2`, or spelled out.
        plan: a plan to run instead of a built one.
        first_step: number of the first step; the weights loaded count as this version.
        also: further methods of the flow to trace, such as "evaluate", each with the number of
            items it is planned for; see `Run.run_method`.
        num_threads: threads of an eager run; by default one for each core of its lane.

    Raises:
        UserError: the flow, the mode, the lanes or the plan are wrong. Nothing was started then.
    """
    graph = flow.trace()
    graphs = {"step": graph, **{method: flow.trace(method) for method in also}}
    if plan is None:
        specs = parse_lanes(lanes) if isinstance(lanes, str) else lanes
        plan = build_plan(mode, graph, specs, items_per_step)
    validate(plan, graph, items_per_step)
    plans = {"step": plan}
    plans |= {method: companion(plan, graphs[method], items) for method, items in also.items()}
    everything = Plan(
        plan.mode,
        plan.lanes,
        {worker: spot for each in plans.values() for worker, spot in each.placements.items()},
        deadline_seconds=plan.deadline_seconds,
    )
    workers = {
        name: worker for name, worker in flow.workers.items() if name in everything.placements
    }
    if plan.mode == "eager":
        threads = num_threads or max(1, len(plan.lanes[0].cores))
        device = "cpu" if plan.lanes[0].kind == "cpu" else "cuda:0"
        _set_num_threads(threads)
        carrier: Any = InlineCarrier(graphs, everything, workers, threads, device, first_step)
        return Run(graphs, plans, carrier, items_per_step, first_step)

    from m2flow.runtime.carrier import RayCarrier
    from m2flow.runtime.cluster import Cluster

    cluster = Cluster(plan.lanes)
    try:
        carrier = RayCarrier(graphs, everything, workers, plans, first_step)
    except BaseException:
        cluster.close()
        raise
    return Run(graphs, plans, carrier, items_per_step, first_step, cluster)


class Run:
    """A flow on its lanes. Made by `launch`; use it as a context manager, or call `close`.

    Attributes:
        plan: the plan of the steps.
        graph: their graph.
    """

    def __init__(
        self,
        graphs: dict[str, Any],
        plans: dict[str, Plan],
        carrier: Any,
        items_per_step: int,
        first_step: int,
        cluster: Any = None,
    ) -> None:
        self.graph, self.plan = graphs["step"], plans["step"]
        self._items_per_step = items_per_step
        self._carrier, self._cluster = carrier, cluster
        self._runners = {
            name: Runner(name, graphs[name], plans[name], carrier, first_step) for name in graphs
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
        """Call a method of a worker that is no stage (such as `save`), on its first lane."""
        return self._carrier.worker_call(worker, method, *args)

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """The same on all of its lanes; the answers in order of rank."""
        answers: list[Any] = self._carrier.worker_call_everywhere(worker, method, *args)
        return answers

    def close(self) -> None:
        """End the lanes, and the Ray cluster if it was started for this run."""
        self._carrier.close()
        if self._cluster is not None:
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _set_num_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)
