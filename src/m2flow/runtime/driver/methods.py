"""`Methods`: a flow's traced methods, and the plans under which they share lanes and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from m2flow.engine.plan import Plan
from m2flow.errors import PlanError, UserError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Worker
from m2flow.plan import companion, validate, with_sizes
from m2flow.plan.memory import check_memory
from m2flow.plan.validate import check_equal_gangs, check_executable
from m2flow.runtime.arguments import check_kind

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool

STEP = "step"


@dataclass(frozen=True)
class Plans:
    """The plan of each method, and one that has all of their placements and lanes."""

    by_method: Mapping[str, Plan]
    everything: Plan

    def placed(self, workers: Mapping[str, Worker]) -> dict[str, Worker]:
        """The workers of a flow that stand on lanes."""
        return {name: one for name, one in workers.items() if name in self.everything.placements}

    def sized(self, state_bytes: Mapping[str, int], graphs: Mapping[str, FlowGraph]) -> Plans:
        """The plans with the sizes that workers say they have, where a plan says none itself.

        Raises:
            PlanError: a lane cannot hold what a command needs.
        """
        spots = self.everything.placements.items()
        unknown = {worker for worker, spot in spots if not spot.state_bytes}
        sizes = {worker: size for worker, size in state_bytes.items() if worker in unknown}
        sized = {
            name: with_sizes(plan, {w: n for w, n in sizes.items() if w in plan.placements}, {})
            for name, plan in self.by_method.items()
        }
        for name, plan in sized.items():
            check_memory(plan, graphs[name])
        return Plans(sized, with_sizes(self.everything, sizes, {}))


@dataclass(frozen=True)
class Methods:
    """What a run can do.

    Attributes:
        graphs: the traced methods by name; "step" among them.
        num_items: source items for which each is planned.
        isolated: workers that must have a process of their own.
        collective: workers whose lanes can share a call.
    """

    graphs: Mapping[str, FlowGraph]
    num_items: Mapping[str, int]
    isolated: frozenset[str] = frozenset()
    collective: frozenset[str] = frozenset()

    def checked(self, batch: Batch) -> Batch:
        """A batch of the step.

        Raises:
            UserError: it is none, or has another number of items than was planned for.
        """
        check_batch(batch)
        if len(batch) != self.num_items[STEP]:
            raise UserError(
                "the step was planned for another number of items",
                key="items_per_step",
                value=len(batch),
                expected=str(self.num_items[STEP]),
            )
        return batch

    def planned(self, plan: Plan) -> Plans:
        """A plan of the step, with plans for the other methods that keep its placements.

        Raises:
            PlanError: it does not fit the step's graph, or cannot be run.
        """
        validate(plan, self.graphs[STEP], self.num_items[STEP], self.isolated)
        check_executable(plan)
        plans = {STEP: plan}
        lanes = plan.lanes  # each further method may reserve some, numbered after those before
        for name in [name for name in self.graphs if name != STEP]:
            base = replace(plan, lanes=lanes)
            plans[name] = companion(base, self.graphs[name], self.num_items[name], self.isolated)
            lanes = plans[name].lanes
        spots = {
            worker: spot for each in plans.values() for worker, spot in each.placements.items()
        }
        everything = replace(plan, lanes=lanes, placements=spots)
        for graph in self.graphs.values():
            self._check_gangs(everything, graph)
        return Plans(plans, everything)

    def _check_gangs(self, plan: Plan, graph: FlowGraph) -> None:
        """Refuse gangs that could not work together."""
        for node in graph.nodes:
            check_equal_gangs(node, plan.placements[node.worker])
            replicas = plan.placements[node.worker].replicas
            sizes = {len(gang) for gang in replicas}
            if node.streaming and sizes != {1} and node.worker not in self.collective:
                raise PlanError(
                    f"{node.name} streams, and its lanes do not share the work of a call",
                    key=f"placements.{node.worker}",
                    value=replicas,
                    hint="let each replica be a single lane; a worker that divides its model over "
                    "a gang says so by `collective = True`",
                )


def check_batch(batch: object) -> None:
    """Refuse to run a method on what is no Batch.

    Raises:
        UserError: it is none.
    """
    check_kind("batch", batch, Batch, "items by column: Batch({name: column, ...})")


def check_lanes(plan: Plan, pool: LanePool) -> None:
    """Refuse a plan for lanes that a pool does not have; limits of memory may differ.

    Raises:
        UserError: names the lane.
    """
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
