"""Profiles of hardware that is not here: each stage's work in words, made seconds by roofline.

The caller says what each stage of the graph does (`Generate`, `Forward`, `Train`, `Act`,
`Simulate`; any other is a `Fixed` price), and on which model. What comes out is the same `Profile`
that measuring gives, one layout for each number of lanes that a replica may have and that holds
it. Nothing here chooses between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from m2flow.errors import UserError, suggestion
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.analytic_generating import generated_on
from m2flow.plan.analytic_training import (
    Place,
    passed_on,
    policy_trained_on,
    state_bytes,
    trained_on,
)
from m2flow.plan.analytic_work import (
    Act,
    Fixed,
    Forward,
    Generate,
    Simulate,
    Train,
    TrainPolicy,
    Work,
    model_name,
)
from m2flow.plan.clusters import Cluster
from m2flow.plan.footprint import replica_sizes
from m2flow.plan.hardware import (
    DISPATCH_SECONDS,
    MESSAGE_SECONDS,
    NETWORK_FRACTION,
    NVLINK_FRACTION,
)
from m2flow.plan.models import WEIGHT_BYTES
from m2flow.plan.profile import (
    PLACES,
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.roofline import (
    Layout,
    Rates,
    action_seconds,
    host_copy_seconds,
    publish_seconds,
)
from m2flow.plan.sampled import curve, rising
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds

QUANTILES = 129
"""Of output lengths; the last of them still tells cut answers from long ones."""


def analytic_profile(
    graph: FlowGraph,
    cluster: Cluster,
    work: Mapping[str, Work],
    items: int,
    rates: Rates | None = None,
) -> Profile:
    """The profile of a flow on a cluster, by roofline.

    Args:
        graph: the flow.
        cluster: need not exist.
        work: by stage name, what the stage does; one left out is `Fixed`.
        items: of the step's input, the most that a stage's curve is asked for.
        rates: attained shares of the peaks.

    Raises:
        UserError: `work` names a stage that the graph does not have; a model fits on no number of
            lanes of any kind (says the smallest number that would do).
    """
    names = [node.name for node in graph.nodes]
    for name in work:
        if name not in names:
            raise UserError("the flow has no such stage", key=name, hint=suggestion(name, names))
    made = _Maker(graph, cluster, work, rates or Rates(), items)
    workers = {worker: made.worker(worker) for worker in graph.workers}
    return Profile(
        stages={node.name: made.stage(node) for node in graph.nodes},
        workers={worker: layouts for worker, layouts in workers.items() if layouts},
        publish=made.publishing(),
        links=_links(cluster),
        dispatch=Seconds(DISPATCH_SECONDS),
        key={
            "model": {name: model_name(what) for name, what in sorted(work.items())},
            "shapes": {"items": items},
            "hardware": {"cluster": str(cluster)},
        },
        source="analytic",
    )


class _Maker:
    """What all stages of one profile have in common."""

    def __init__(
        self,
        graph: FlowGraph,
        cluster: Cluster,
        work: Mapping[str, Work],
        rates: Rates,
        items: int,
    ) -> None:
        self.graph, self.cluster, self.rates, self.items = graph, cluster, rates, items
        self.work = {node.name: work.get(node.name, Fixed()) for node in graph.nodes}
        self.trained = {
            node.worker: what
            for node in graph.nodes
            if isinstance(what := self.work[node.name], Train)
        }

    def stage(self, node: StageNode) -> StageProfile:
        work = self.work[node.name]
        layouts: list[StageCost] = []
        unfit: UserError | None = None
        for kind, device in self.cluster.kinds.items():
            lanes = self.cluster.lanes_of(kind)
            place = Place(device, lanes, self.items * node.fanout, self.rates)
            try:
                layouts += [replace(layout, kind=kind) for layout in self._layouts(node, place)]
            except UserError as error:
                unfit = unfit if unfit and device.kind == "cpu" else error
        if not layouts:
            raise unfit or UserError(
                "no lane of the cluster can run this stage",
                key=node.name,
                value=str(self.cluster),
                expected=f"{work.simulator.kind} lanes" if isinstance(work, Simulate) else None,
            )
        lengths = None
        if isinstance(work, Generate):
            lengths = Quantiles.of(work.answers.lengths.sample(4 * QUANTILES), QUANTILES)
        return StageProfile(tuple(layouts), _output_bytes(work), lengths)

    def _layouts(self, node: StageNode, place: Place) -> list[StageCost]:
        work = self.work[node.name]
        match work:
            case Generate():
                return generated_on(work, node.expands, place)
            case Forward():
                return passed_on(work, self.trained.get(node.worker), place)
            case Train():
                return trained_on(work, place)
            case Act():
                return _acted_on(work, place)
            case TrainPolicy():
                return policy_trained_on(work, place)
            case Simulate():
                return _simulated_on(work, place)
            case Fixed():
                return _priced_on(work, place)

    def worker(self, name: str) -> tuple[WorkerCost, ...]:
        """State by lanes: a trainer's if any of its stages trains, else weights, else nothing."""
        works: Sequence[Work] = [
            self.work[node.name] for node in self.graph.nodes if node.worker == name
        ]
        if any(isinstance(work, Train) for work in works):
            works = [work for work in works if not isinstance(work, Forward)]
        found = []
        for kind, device in self.cluster.kinds.items():
            for count in rising(self.cluster.lanes_of(kind)):
                size = max(state_bytes(work, count, device, self.rates) for work in works)
                if size <= 0:
                    continue
                moved = Seconds(host_copy_seconds(size, device))
                found.append(WorkerCost(count, Bytes(math.ceil(size)), moved, moved, kind))
        return tuple(found)

    def publishing(self) -> tuple[PublishCost, ...]:
        """To workers that generate or act, by how many lanes their replicas have."""
        sizes: dict[str, int] = {}
        for node in self.graph.nodes:
            match self.work[node.name]:
                case Generate(model=model):
                    sizes[node.worker] = model.weight_bytes
                case Act(policy=policy):
                    sizes[node.worker] = policy.parameters * WEIGHT_BYTES
        device = next(iter(self.cluster.kinds.values()))
        most = max(one.lanes_per_node for one in self.cluster.kinds.values())
        found = []
        for edge in self.graph.weight_edges:
            for lanes in replica_sizes(most) if edge.target in sizes else ():
                for place in PLACES:
                    seconds = publish_seconds(
                        sizes[edge.target], device, device, Layout(lanes), place != "cluster"
                    )
                    found.append(
                        PublishCost(edge.source, edge.target, place, Seconds(seconds), None, lanes)
                    )
        return tuple(found)


def _acted_on(work: Act, place: Place) -> list[StageCost]:
    if work.policy.parameters * WEIGHT_BYTES > place.device.usable_bytes:
        return []
    seconds = curve(
        lambda n: action_seconds(work.policy, n, place.device, place.rates), rising(place.most)
    )
    return [StageCost(1, seconds)]


def _simulated_on(work: Simulate, place: Place) -> list[StageCost]:
    if work.simulator.kind != place.device.kind:
        return []
    seconds = curve(work.simulator.seconds, rising(place.most))
    each = float(work.simulator.bytes_per_env)
    return [StageCost(1, seconds, working=Piecewise(((1.0, each),)))]


def _priced_on(work: Fixed, place: Place) -> list[StageCost]:
    seconds = curve(lambda n: work.seconds_per_call + n * work.seconds_per_item, rising(place.most))
    return [StageCost(1, seconds)]


def _output_bytes(work: Work) -> Bytes:
    match work:
        case Generate() | Forward() | Train():
            return Bytes(int(16 * work.answers.tokens))  # ids, log-probabilities, masks
        case Simulate() | Act() | TrainPolicy():
            return Bytes(3 * 224 * 224)  # an image
    return Bytes(64)


def _links(cluster: Cluster) -> dict[str, LinkCost]:
    """The slowest device's, as a message may meet it."""
    devices = list(cluster.kinds.values())
    rates = {
        "node": min(device.peer_bytes_per_second for device in devices) * NVLINK_FRACTION,
        "cluster": min(device.network_bytes_per_second for device in devices) * NETWORK_FRACTION,
    }
    return {
        place: LinkCost(Seconds(MESSAGE_SECONDS[place]), BytesPerSecond(rate))
        for place, rate in rates.items()
    }
