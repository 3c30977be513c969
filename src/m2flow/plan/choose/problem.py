"""`PlanningProblem`: what a plan is chosen for, with the layouts that the lanes can carry.

Lanes are told apart by their kind and their machine only. What the profile says is read here, and
kept by what it was asked for, so that ten thousand drafts can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode
from m2flow.plan.chunks import window_units
from m2flow.plan.profile import Profile, StageCost, WorkerCost
from m2flow.plan.units import Bytes, Items, Seconds

T = TypeVar("T")


class PlanningProblem:
    """A flow, its prices and the lanes.

    Args:
        graph, profile, num_items: what is planned.
        lanes: those that are free for any worker.

    Attributes:
        ids: for each kind its lanes, those of one machine together.
        memory: for each kind the least memory of its lanes; None for no limit.
        workers: those that stages run on.
        companions: for each worker those that only take its weights; they stand with it.
        options: for each worker its state, and that of those that stand with it, in each layout in
            which all of its stages have a price; one object for each.
        weight_edges: (source, target) of those between workers that stages run on, by number.
        near: for each stage the workers, by number, of its neighbours in the graph.

    Raises:
        UserError: there is no lane, or a worker has no layout that these lanes can carry.
    """

    def __init__(
        self, graph: FlowGraph, profile: Profile, lanes: Sequence[LaneSpec], num_items: int
    ) -> None:
        if not lanes or num_items < 1:
            raise UserError("a plan needs a lane and an item", key="lanes", value=len(lanes))
        self.graph, self.profile, self.num_items = graph, profile, num_items
        self.lanes = tuple(lanes)
        self.by_id = {lane.id: lane for lane in lanes}
        ordered = sorted(lanes, key=lambda lane: (lane.node, lane.id))
        kinds = sorted({lane.kind for lane in lanes})
        self.ids = {k: tuple(lane.id for lane in ordered if lane.kind == k) for k in kinds}
        limits = [(x.kind, x.memory_bytes) for x in lanes if x.memory_bytes is not None]
        self.memory = {k: min((m for kind, m in limits if kind == k), default=None) for k in kinds}
        self.workers = graph.workers
        self.number = {worker: n for n, worker in enumerate(self.workers)}
        apart = [x for x in dict.fromkeys(graph.weight_edges) if x.target not in self.workers]
        self.companions = {w: tuple(x.target for x in apart if x.source == w) for w in self.workers}
        self.nodes_of = {w: [n for n in graph.nodes if n.worker == w] for w in self.workers}
        self.options = {worker: self._options(worker) for worker in self.workers}
        self.windows = [window_units(node, num_items) for node in graph.nodes]
        self.unit_items = [node.unit_items(num_items * node.fanout) for node in graph.nodes]
        self.weight_edges = tuple(
            (self.number[edge.source], self.number[edge.target])
            for edge in graph.weight_edges
            if edge.source in self.number and edge.target in self.number
        )
        self.near: list[set[int]] = [set() for _ in graph.nodes]
        for producer, consumer in graph.edges:
            if producer != SOURCE:
                self.near[producer].add(self.number[graph.nodes[consumer].worker])
                self.near[consumer].add(self.number[graph.nodes[producer].worker])
        self._cost = cache(profile.cost)
        self._kept: dict[tuple[object, ...], Any] = {}

    def _options(self, worker: str) -> tuple[WorkerCost, ...]:
        nodes = self.nodes_of[worker]
        costs = [self.profile.stage(node.name).costs for node in nodes]
        single = any(node.sticky or (node.streaming and node.is_function) for node in nodes)
        known = [{(one.lanes, one.layout, one.kind) for one in some} for some in costs]
        found = []
        for lanes, layout, kind in sorted(set.intersection(*known)):
            state = self.profile.worker(worker, lanes, kind, layout)
            fits = kind in self.ids and lanes <= len(self.ids[kind])
            if state is None or not fits or (single and lanes > 1):
                continue
            beside = [self.profile.worker(x, lanes, kind) for x in self.companions[worker]]
            states = [state, *(one for one in beside if one is not None)]
            found.append(
                replace(
                    state,
                    state_bytes=Bytes(sum(x.state_bytes for x in states)),
                    onload=Seconds(sum(x.onload for x in states)),
                    offload=Seconds(sum(x.offload for x in states)),
                )
            )
        if not found:
            raise UserError(
                "has no layout in the profile that these lanes can carry",
                key=worker,
                value={kind: len(ids) for kind, ids in self.ids.items()},
                expected=" or ".join(
                    f"{lanes} x {kind} ({layout})"
                    for lanes, layout, kind in sorted(set.union(*known))
                ),
            )
        return tuple(found)

    def kept(self, function: Callable[..., T], *asked: Hashable) -> T:
        """What a function says of this problem; it is asked the same only once."""
        key = function, *asked
        try:
            found: T = self._kept[key]
        except KeyError:
            found = self._kept[key] = function(self, *asked)
        return found

    def cost(self, node: StageNode, option: WorkerCost, running: int | None) -> StageCost:
        """What a stage takes in a layout under a running limit."""
        return self._cost(node.name, option.layout, option.lanes, option.kind, running)

    def call_seconds(
        self, node: StageNode, option: WorkerCost, running: int | None, units: int
    ) -> float:
        """A call on so many units, with what it costs beside the stage.

        Of a streaming stage that may hold fewer units the calls that it would take one after
        another.
        """
        cost, each = self.cost(node, option, running), self.unit_items[node.index]
        held = units if running is None else min(units, running)
        return cost.call(Items(held * each)) * units / held + self.profile.dispatch

    def working_bytes(
        self, node: StageNode, option: WorkerCost, running: int | None, units: int
    ) -> int:
        """What a call on so many units takes on each lane beside the state."""
        held = units if running is None else min(units, running)
        cost = self.cost(node, option, running)
        return cost.working_bytes(Items(held * self.unit_items[node.index]))

    def turns(self, node: StageNode) -> float:
        """How many turns an item stays in the stage's loop, in the mean; 1 outside of loops."""
        if node.loop is None:
            return 1.0
        loop = self.graph.loops[node.loop]
        known = self.profile.stage(self.graph.nodes[loop.members[0]].name).turns
        return float(loop.max_turns or 1) if known is None else max(1.0, known.mean)
