"""Profiles of hardware that is not here: a workload's declared work, made seconds by roofline.

What comes out is the same `Profile` that measuring gives, with one price for each declared layout
that is possible and that fits into the memory of a kind of lane. Nothing here chooses between
layouts, and nothing here knows what a stage computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from m2flow.errors import UserError, suggestion
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.profile import (
    PLACES,
    ByReplicas,
    LinkCost,
    Profile,
    PublishCost,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.profile.clusters import Cluster
from m2flow.plan.profile.hardware import (
    DISPATCH_SECONDS,
    MESSAGE_SECONDS,
    NETWORK_FRACTION,
    NVLINK_FRACTION,
    Device,
)
from m2flow.plan.profile.streaming import limited
from m2flow.plan.profile.work import (
    FlowWork,
    LayoutWork,
    Pricer,
    Rounds,
    StageWork,
    WorkerWork,
    curve,
    rising,
    total,
    without,
)
from m2flow.plan.sizes import bytes_text
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds

NO_STAGE, NO_STATE = StageWork((LayoutWork(),)), WorkerWork(())


def analytic_profile(graph: FlowGraph, cluster: Cluster, prices: Pricer, items: int) -> Profile:
    """Return the profile of a flow on a cluster that need not exist.

    Args:
        graph: the flow.
        cluster: its lanes.
        prices: the workload's; asked once for each kind of lane.
        items: of the step's input, the most that a stage's curve is asked for.

    Raises:
        UserError: `prices` name a stage that the graph does not have, or a stage fits on no lanes.
    """
    kinds = [
        _Kind(name, device, lanes, prices(device, lanes), items)
        for name, device in cluster.kinds.items()
        for lanes in (cluster.lanes_of(name),)
    ]
    names = [node.name for node in graph.nodes]
    for name in (name for kind in kinds for name in kind.work.stages):
        if name not in names:
            raise UserError("the flow has no such stage", key=name, hint=suggestion(name, names))
    stages = {node.name: _stage(node, kinds, cluster) for node in graph.nodes}
    workers = {
        worker: tuple(cost for kind in kinds for cost in kind.workers(worker))
        for worker in graph.workers
    }
    assumed = (line for kind in kinds for line in (*kind.work.assumptions, *kind.notices))
    return Profile(
        stages=stages,
        workers={worker: costs for worker, costs in workers.items() if costs},
        publish=tuple(_publishing(graph, kinds)),
        links=_links(cluster),
        dispatch=Seconds(DISPATCH_SECONDS),
        key={
            "model": {"name": kinds[0].work.model},
            "shapes": {"items": items},
            "hardware": {"cluster": str(cluster)},
        },
        source="analytic",
        assumptions=tuple(dict.fromkeys(assumed)),
    )


@dataclass(frozen=True)
class _Kind:
    """One kind of lane, and the workload's prices there.

    Attributes:
        name: of the kind.
        lanes: how many there are.
        items: source items of a step.
        notices: layouts that are not possible, and what prices take for granted.
    """

    name: str
    device: Device
    lanes: int
    work: FlowWork
    items: int
    notices: list[str] = field(default_factory=list)

    def stage(self, node: StageNode) -> StageWork:
        return self.work.stages.get(node.name, NO_STAGE)

    def costs(self, node: StageNode) -> Iterator[StageCost]:
        """Price a stage on each layout that is possible and fits."""
        work, most = self.stage(node), self.items * node.fanout
        for one in self.fitting(node):
            cost = self._cost(one, most)
            if one.rounds is None or work.lengths is None:
                yield cost
            else:
                room = self._unit_room(node, one, one.rounds)
                yield from limited(
                    cost, one.rounds, work.lengths, node.expands, most, self.device, room
                )

    def fitting(self, node: StageNode) -> list[LayoutWork]:
        """Return, of each declared layout, the first way to run it that is possible and fits."""
        work = self.stage(node)
        found: dict[str, LayoutWork] = {}
        for one in work.layouts:
            obstacle = one.layout.obstacle()
            new = one.layout.lanes <= self.lanes and one.layout.name not in found
            if obstacle is not None:
                self.notices.append(f"{node.worker} cannot have {one.layout.name}: {obstacle}")
            elif new and self._lacking(node, one) <= 0.0:
                found[one.layout.name] = one
        return list(found.values())

    def nearest(self, node: StageNode) -> str:
        """Say which layout that is possible comes nearest to fitting, and what it lacks."""
        lacking = [
            (self._lacking(node, one), one.layout.name)
            for one in self.stage(node).layouts
            if one.layout.obstacle() is None and one.layout.lanes <= self.lanes
        ]
        if not lacking:
            return "no layout of it is possible there"
        least, name = min(lacking)
        return f"the nearest layout, {name}, lacks {bytes_text(least)} on each"

    def _lacking(self, node: StageNode, one: LayoutWork) -> float:
        """Return the bytes of each lane that the smallest call lacks; at most 0 where it fits."""
        lacking, rounds = -self._room(node, one), one.rounds
        if rounds is None:
            return lacking
        longest = rounds.unit_bytes * rounds.longest
        return max(lacking, longest - self._unit_room(node, one, rounds))

    def _unit_room(self, node: StageNode, one: LayoutWork, rounds: Rounds) -> float:
        """Return the bytes of each lane that units of output items may take."""
        room, reserved = self._room(node, one), rounds.reserved_bytes
        if reserved is None:
            return room
        return reserved if rounds.in_state else min(room, reserved)

    def _room(self, node: StageNode, one: LayoutWork) -> float:
        """Return the bytes of each lane that the state and the smallest call leave."""
        states = self.work.workers.get(node.worker, NO_STATE).states
        state = next((total(held) for layout, held in states if layout == one.layout), 0.0)
        return self.device.usable_bytes - state - total(one.working_bytes(1))

    def _cost(self, one: LayoutWork, most: int) -> StageCost:
        calls, finish = rising(most), None
        if (ends := one.finish) is not None:
            counts = rising(self.lanes // one.layout.lanes)
            finish = ByReplicas(tuple((float(n), ends(n).on(self.device)) for n in counts))
        return StageCost(
            one.layout.lanes,
            curve(lambda items: one.call(items).on(self.device), calls),
            finish=finish,
            working=curve(lambda items: total(one.working_bytes(items)), calls),
            kind=self.name,
            layout=one.layout.name,
            elsewhere=one.elsewhere,
        )

    def workers(self, name: str) -> Iterator[WorkerCost]:
        """Price the moves of a worker's state on each layout that is possible and fits."""
        worker = self.work.workers.get(name, NO_STATE)
        for layout, held in worker.states:
            size = total(held)
            fits = layout.lanes <= self.lanes and size <= self.device.usable_bytes
            if fits and layout.obstacle() is None:
                kept = without(held, worker.dropped)
                moved = Seconds(self.device.host_copy_seconds(kept))
                state = Bytes(math.ceil(size))
                yield WorkerCost(layout.lanes, state, moved, moved, self.name, layout.name)


def _stage(node: StageNode, kinds: Sequence[_Kind], cluster: Cluster) -> StageProfile:
    costs = tuple(cost for kind in kinds for cost in kind.costs(node))
    if costs:
        work = next(kind for kind in kinds if kind.name == costs[0].kind).stage(node)
        return StageProfile(costs, Bytes(math.ceil(work.output_bytes)), work.lengths, work.turns)
    able = [kind for kind in kinds if kind.stage(node).layouts] or kinds
    kind = max(able, key=lambda one: one.device.usable_bytes)
    what = f"{node.name} of {kind.work.model}" if kind.work.model else node.name
    raise UserError(
        f"{what} fits on no {kind.lanes} lane{'s' * (kind.lanes > 1)} of {kind.device.name}: "
        f"{kind.nearest(node)}",
        key="cluster",
        value=str(cluster),
        expected="more lanes, or lanes with more memory or of another kind",
    )


def _publishing(graph: FlowGraph, kinds: Sequence[_Kind]) -> Iterator[PublishCost]:
    """Price publishing to each layout of a target: every lane takes its share of a replica.

    The slower of the two ends sets the rate.
    """
    for edge, source, target in product(graph.weight_edges, kinds, kinds):
        size = target.work.workers.get(edge.target, NO_STATE).weight_bytes
        layouts = {cost.lanes for cost in target.workers(edge.target)}
        if not size or not any(source.workers(edge.source)):
            continue
        ends = (source.device, target.device)
        network = min(one.network_bytes_per_second for one in ends) * NETWORK_FRACTION
        for lanes, place in product(sorted(layouts), PLACES):
            rate = network
            if place != "cluster":
                rate = min(one.collective_bytes_per_second(lanes) for one in ends)
            seconds = Seconds(size / lanes / rate)
            yield PublishCost(
                edge.source, edge.target, place, seconds, None, lanes, source.name, target.name
            )


def _links(cluster: Cluster) -> dict[str, LinkCost]:
    """Return the slowest device's links, as a message may meet them."""
    devices = list(cluster.kinds.values())
    rates = {
        "node": min(device.peer_bytes_per_second for device in devices) * NVLINK_FRACTION,
        "cluster": min(device.network_bytes_per_second for device in devices) * NETWORK_FRACTION,
    }
    return {
        place: LinkCost(Seconds(MESSAGE_SECONDS[place]), BytesPerSecond(rate))
        for place, rate in rates.items()
    }
